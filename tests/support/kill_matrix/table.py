# SPDX-License-Identifier: Apache-2.0
"""The kill matrix as a text that is kept, and what it says of each file of tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.support.kill_matrix.matrix import LAYERS, Row, file_of, layer
from tests.support.kill_matrix.places import ROOT

PATH = ROOT / "tests" / "kill_matrix.txt"

HEAD = """\
Which tests fail with which bug. `scripts/test --kill-matrix --write` makes it (CONTRIBUTING.md).
A bug is named by the test file that plants it. Below it: tests that fail with it, one of a file,
of three files at most in each layer. The bug's own test is one of them. Left out are tests that
need real etcd, torchrun, a cluster, a container engine or processes of their own, and e2e, chart.
The search in a layer ends after some seconds of CPU: a row without a test of a layer does not
say that none there fails.
"""
FILES = "Files: bugs that one of its tests kills, and how many of these no other file does."


def parsed(path: Path = PATH) -> dict[str, Row]:
    """The rows of a table, by bug."""
    rows: dict[str, Row] = {}
    row = None
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line == FILES:
            break
        if line.startswith("    ") and row is not None:
            test = f"tests/{line.strip()}"
            row.killers[layer(test)].append(test)
        elif " | " in line:
            row = Row(line.rpartition(" | ")[0])
            rows[row.bug] = row
    return rows


def text(rows: Iterable[Row]) -> str:
    """A table."""
    lines = [HEAD]
    made = sorted(rows, key=lambda row: row.bug)
    for row in made:
        counts = ", ".join(f"{one} {len(row.killers[one])}" for one in LAYERS if row.killers[one])
        lines.append(f"{row.bug} | {counts or 'none'}")
        lines += [
            f"    {test.removeprefix('tests/')}" for one in LAYERS for test in row.killers[one]
        ]
    lines += ["", FILES]
    for name, (kills, alone) in sorted(of_files(made).items()):
        lines.append(f"{name.removeprefix('tests/')} | {kills} | {alone}")
    return "\n".join(lines) + "\n"


def of_files(rows: Iterable[Row]) -> Mapping[str, tuple[int, int]]:
    """Of each file, how many bugs its tests kill, and how many of them no other file kills."""
    found: dict[str, tuple[int, int]] = {}
    for row in rows:
        files = {file_of(test) for tests in row.killers.values() for test in tests}
        for name in files:
            kills, alone = found.get(name, (0, 0))
            found[name] = kills + 1, alone + (len(files) == 1)
    return found


def write(made: Iterable[Row], there: Iterable[str]) -> None:
    """Put rows into the kept table; those of bugs that are no longer there go."""
    rows = parsed() | {row.bug: row for row in made}
    kept = set(there)
    PATH.write_text(text(row for name, row in rows.items() if name in kept), encoding="utf-8")
