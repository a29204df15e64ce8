# SPDX-License-Identifier: Apache-2.0
"""The check of a training script and of its Python, before a node starts.

The launcher's own Python is asked: it may be of another version than the one that runs this.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

ANSWER_TIMEOUT_S = 20.0
"""Ends the wait for a Python that hangs; the script is then not checked."""

HEAD_BYTES = 1024
SHOWN_CHARACTERS = 60

_SHEBANG = re.compile(r"#! *(\S*python[\d.]*|/\S*/env +(?:-S +)?\S*python[\d.]*)((?: +-\S+)*) *\n")
_LONG_SHEBANG = re.compile(r"#! */bin/sh\n'''exec' \"?([^\"\n]*python[\d.]*)\"? ")
"""Installers write this one if the path of Python has a space or is long."""

_ASK = """\
import importlib.util, json, sys, warnings
warnings.simplefilter("ignore")
script, fault = sys.argv[1], None
if script:
    try:
        with open(script, "rb") as file:
            compile(file.read(), script, "exec", dont_inherit=True)
    except SyntaxError as error:
        fault = [error.lineno, error.msg, error.text]
    except ValueError as error:
        fault = [None, str(error), None]
    except (OSError, RecursionError, MemoryError):
        pass
print(json.dumps([importlib.util.find_spec("torch") is not None, fault]))
"""


def interpreter_of(launcher: Path) -> tuple[str, ...]:
    """Return the words that start the Python of a launcher; empty if it is no Python script."""
    try:
        with launcher.open("rb") as file:
            head = file.read(HEAD_BYTES).decode(errors="replace")
    except OSError:
        return ()
    if match := _SHEBANG.match(head):
        return (*match[1].split(), *match[2].split())
    if match := _LONG_SHEBANG.match(head):
        return (match[1],)
    return ()


def script_fault(
    python: Sequence[str],
    script: str | None,
    *,
    needs_torch: bool,
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> str:
    """Return what keeps ``python`` from running ``script``; empty if nothing does, or if unknown.

    ``script``: None for a module or another program.
    """
    try:
        asked = subprocess.run(
            (*python, "-c", _ASK, script or ""),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )
        has_torch, fault = json.loads(asked.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return ""
    if needs_torch and not has_torch:
        return (
            f"{' '.join(python)} cannot import torch: install torch there, or activate the"
            " environment that has it"
        )
    if fault is None:
        return ""
    line, message, text = fault
    where = f"{script}, line {line}" if line else f"{script}"
    shown = f": {' '.join(text.split())[:SHOWN_CHARACTERS]}" if text and text.strip() else ""
    return f"{where}: {message}{shown}"
