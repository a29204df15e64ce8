# SPDX-License-Identifier: Apache-2.0
"""Where a long line is broken, and where it is not."""

from __future__ import annotations

import io
import os
import pty

import pytest

from console.styling import broken, wrapped

TEXT = "warning  access  authentication is off: see docs/security.md#set-up, which takes 30 s"


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_a_line_is_broken_at_words_alone(columns: int) -> None:
    lines = broken(TEXT, columns, 17).splitlines()
    assert max(map(len, lines)) <= columns
    assert " ".join(" ".join(lines).split()) == " ".join(TEXT.split())
    indent = " " * (17 if columns >= 60 else 2)
    assert all(line.startswith(indent) and line[len(indent)] != " " for line in lines[1:])


def test_a_number_stays_with_its_unit_and_a_path_whole() -> None:
    assert broken("it has 30 s", 10, 2) == "it has\n  30 s"
    path = "/tmp/a-directory/with-a-long-name/torchrun.log"
    assert path in broken(f"see {path} for more", 20, 2)


def test_a_terminal_that_tells_no_size_has_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        lines = wrapped(TEXT, terminal, 17).splitlines()
    os.close(ours)
    assert lines == broken(TEXT, 80, 17).splitlines()


def test_what_goes_to_no_terminal_stays_one_line() -> None:
    assert wrapped(TEXT, io.StringIO(), 17) == TEXT
