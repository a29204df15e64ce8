# SPDX-License-Identifier: Apache-2.0
"""Which horovodrun is started by its entry point: the script that an installer writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_shim.pod.entry_point import started_lightly
from launcher_shim.pod.launch import Launch, read_launch

PIP = """\
# -*- coding: utf-8 -*-
import re
import sys
from horovod.runner.launch import run_commandline
if __name__ == '__main__':
    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])
    sys.exit(run_commandline())
"""
UV = """\
# -*- coding: utf-8 -*-
import sys
from horovod.runner.launch import run_commandline
if __name__ == "__main__":
    if sys.argv[0].endswith(".exe"):
        sys.argv[0] = sys.argv[0][:-4]
    sys.exit(run_commandline())
"""
OTHER = """\
from other import run_commandline
if __name__ == '__main__':
    run_commandline()
"""
OWN = """\
import os
from horovod.runner.launch import run_commandline
os.environ["HOROVOD_LOG_LEVEL"] = "debug"
run_commandline()
"""


@pytest.mark.parametrize(
    ("shebang", "interpreter"),
    [
        ("#!/opt/venv/bin/python", ["/opt/venv/bin/python"]),
        ("#!/opt/conda/bin/python3.10", ["/opt/conda/bin/python3.10"]),
        ("#! /usr/bin/python3 -s", ["/usr/bin/python3", "-s"]),
        ("#!/usr/bin/env python3", ["/usr/bin/env", "python3"]),
        ("#!/usr/bin/env -S -i python3", ["/usr/bin/env", "-S -i python3"]),
    ],
)
@pytest.mark.parametrize("body", [PIP, UV])
def test_an_installers_script_is_started_by_its_entry_point(
    tmp_path: Path, shebang: str, interpreter: list[str], body: str
) -> None:
    program = tmp_path / "horovodrun"
    program.write_text(f"{shebang}\n{body}")
    words = started_lightly(str(program))
    assert words[: len(interpreter) + 1] == [*interpreter, "-c"]
    assert words[-1] == str(program)
    # So muster-run knows it among the processes.
    assert read_launch(7, [*words, "-np", "2"], {}) == Launch("horovodrun", 7)


@pytest.mark.parametrize(
    "content",
    [
        f'#!/bin/sh\nexec /opt/venv/bin/horovodrun -v "$@"\n{PIP}',
        f"#!/usr/bin/env bash\n{PIP}",
        f"#!/usr/bin/python3\n{OWN}",
        f"#!/usr/bin/python3\n{OTHER}",
        "\x7fELF",
        "",
    ],
)
def test_anything_else_is_started_as_it_is(tmp_path: Path, content: str) -> None:
    program = tmp_path / "horovodrun"
    program.write_text(content)
    assert started_lightly(str(program)) == [str(program)]


def test_so_is_what_cannot_be_read(tmp_path: Path) -> None:
    assert started_lightly(str(tmp_path / "none")) == [str(tmp_path / "none")]
