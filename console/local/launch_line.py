# SPDX-License-Identifier: Apache-2.0
"""The command after ``--``: its launcher, and the script's check.

The script and its Python are checked before a node starts. The launcher's own Python is asked: it
may be of another version than the one that runs this.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from launcher_shim.launcher import Launcher
from launcher_shim.pod.launchers import CENTRAL, LAUNCHERS, named
from launcher_shim.torchrun.launcher import TORCHRUN
from rdzv.errors import ConfigError

_WRAPPERS = {
    "accelerate": "it sets the variables that accelerate reads",
    "deepspeed": "DeepSpeed reads the variables that it sets",
    "python": "it starts the script on each node, and passes its arguments on",
}
"""Other ways to start a script, with the reason why torchrun does as well."""

_MODULES = {one.modules[0]: one for one in LAUNCHERS if one.modules}

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


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """A launcher's command as the user gave it; ``slots`` is its worker processes per node.

    ``max_restarts`` is None if the user does not set it; ``script`` is the file that each node
    needs, None for a module or another program. ``program``: the number of words that start the
    launcher.
    """

    command: tuple[str, ...]
    slots: int
    max_restarts: int | None = None
    script: str | None = None
    program: int = 1
    launcher: Launcher = TORCHRUN


def read_launch_line(command: Sequence[str], environ: Mapping[str, str]) -> LaunchLine:
    """Parse and check the user's command; raises ``ConfigError`` with one sentence.

    ``environ``: a launcher may read from there what the command does not say.
    """
    if not command:
        raise ConfigError("no command: say what each node runs, as in -- torchrun train.py")
    launcher, program = _find_launcher(command)
    try:
        given = launcher.local(command[program:], environ)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return LaunchLine(tuple(command), given.slots, given.restarts, given.script, program, launcher)


def _find_launcher(command: Sequence[str]) -> tuple[Launcher, int]:
    """Return the launcher and the number of words that start it; raises ``ConfigError``."""
    program = PurePath(command[0]).name
    if (launcher := named(program)) is not None:
        return launcher, 1
    if re.fullmatch(r"python[\d.]*", program):
        for index, argument in enumerate(command[1:], start=1):
            module = next(iter(command[index + 1 : index + 2]), "")
            if argument == "-m" and module in _MODULES:
                return _MODULES[module], index + 2
            if argument == "-m" or not argument.startswith("-"):
                break
    raise ConfigError(_no_launcher(command, program))


def _no_launcher(command: Sequence[str], program: str) -> str:
    """Say why ``command`` cannot be started, and what to write instead."""
    first, *others = command[0].split() or [""]
    if others and named(PurePath(first).name) is not None:
        return f"{command[0]!r} is one word: remove the quotes: -- {command[0]}"
    known = "python" if re.fullmatch(r"python[\d.]*", program) else program
    if known in _WRAPPERS:
        return (
            f"{program} cannot be started here: write torchrun SCRIPT, because {_WRAPPERS[known]}"
        )
    return (
        f"{command[0]}: no launcher that muster local knows; start the training script with "
        f"torchrun, python -m torch.distributed.run or {CENTRAL.name}"
    )


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
