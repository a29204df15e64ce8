# SPDX-License-Identifier: Apache-2.0
"""The command after ``--``: its launcher, the options refused here, and the script's check.

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

from launcher_shim.horovod.line import (
    DEFAULTS,
    DISCOVERY,
    GLOO_TIMEOUT,
    INTERFACE,
    LEAST,
    MOST,
    PROCESSES,
    REFUSED,
    SLOTS,
    read_options,
)
from launcher_shim.torchrun.launcher import VARIABLES, read_line
from rdzv.errors import ConfigError

_COUNTS = "the number of processes follows from --nodes, --min, --max and --slots-per-host"
_HOSTS = "the launcher's sidecar tells which hosts there are; leave it out"
_LOOPBACK = "all nodes are on this machine's loopback; leave it out"

_REFUSED_BY_HOROVOD = {
    **REFUSED,
    **dict.fromkeys((*PROCESSES, *LEAST, *MOST), _COUNTS),
    DISCOVERY: _HOSTS,
    **dict.fromkeys(INTERFACE, _LOOPBACK),
}

# On one machine a newcomer's imports are cached, so a loss need not stop the others for long.
_DEFAULTS = {**DEFAULTS, GLOO_TIMEOUT: ("30",)}

_REFUSED = {
    "nnodes": "the number of nodes is set by --min and --max of muster local",
    "standalone": "it trains on one node alone; leave it out, and each node has its own torchrun",
    "node-rank": "ranks come from the rendezvous and change with the membership; leave it out",
    "master-addr": "each round has its own master, chosen by the rendezvous; leave it out",
    "master-port": "each round has its own master, chosen by the rendezvous; leave it out",
    "rdzv-id": "the run is named by --job of muster local",
    "rdzv-backend": "the sidecar beside each torchrun serves the rendezvous; leave it out",
    "rdzv-endpoint": "the sidecar beside each torchrun serves the rendezvous; leave it out",
    "rdzv-conf": "the sidecar delivers torchrun's rendezvous settings; leave it out",
}

_WRAPPERS = {
    "accelerate": "it sets the variables that accelerate reads",
    "deepspeed": "DeepSpeed reads the variables that it sets",
    "python": "it starts the script on each node, and passes its arguments on",
}
"""Other ways to start a script, with the reason why torchrun does as well."""

_MODULES = {"torch.distributed.run": "torchrun", "horovod.runner.launch": "horovodrun"}

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
class HorovodLine:
    """horovodrun's command as the user gave it; ``slots`` is its worker processes per node.

    ``program``: its first words, up to the options; ``given``: the options that it names.
    """

    command: tuple[str, ...]
    slots: int
    program: tuple[str, ...]
    given: frozenset[str]

    def full_command(
        self, discovery: Path, *, nodes: int, min_nodes: int, max_nodes: int
    ) -> tuple[str, ...]:
        """Build the command with all options that horovodrun needs; ``discovery`` is the script."""
        start = max(min_nodes, min(nodes, max_nodes))
        options = {
            "-np": (f"{start * self.slots}",),
            "--min-np": (f"{min_nodes * self.slots}",),
            "--max-np": (f"{max_nodes * self.slots}",),
            "--network-interface": ("lo",),
            "--host-discovery-script": (str(discovery),),
            **{name: value for name, value in _DEFAULTS.items() if name not in self.given},
        }
        words = [word for name, values in options.items() for word in (name, *values)]
        return (*self.program, *words, *self.command[len(self.program) :])


def read_horovod_line(command: Sequence[str], program: int) -> HorovodLine:
    """Parse and check a command whose first ``program`` words are horovodrun itself.

    Raises ``ConfigError`` with one sentence.
    """
    slots = 1
    given = set()
    for name, value, _ in read_options(command[program:]).options:
        if name in _REFUSED_BY_HOROVOD:
            raise ConfigError(
                f"horovodrun's {name} cannot be given here: {_REFUSED_BY_HOROVOD[name]}; see"
                " docs/local.md#horovodrun"
            )
        if name == SLOTS:
            if not re.fullmatch(r"[1-9]\d{0,3}", value or "", re.ASCII):
                raise ConfigError(
                    f"--slots-per-host {value}: give a number, "
                    "because the sidecar registers that many slots"
                )
            slots = int(value or "")
        given.add(name)
    return HorovodLine(tuple(command), slots, tuple(command[:program]), frozenset(given))


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """torchrun's command as the user gave it; ``slots`` is its worker processes per node.

    ``max_restarts`` is None if the user does not set it; ``script`` is the file that each node
    needs, None for a module or another program. ``is_module``: the first word is a Python, which
    runs torchrun's module.
    """

    command: tuple[str, ...]
    slots: int
    max_restarts: int | None = None
    script: str | None = None
    is_module: bool = False


def read_launch_line(
    command: Sequence[str], environ: Mapping[str, str]
) -> LaunchLine | HorovodLine:
    """Parse and check the user's command; raises ``ConfigError`` with one sentence.

    ``environ``: torchrun reads its workers' number and restarts from there if the command has none.
    """
    if not command:
        raise ConfigError("no command: say what each node runs, as in -- torchrun train.py")
    launcher, program = _find_launcher(command)
    if launcher == "horovodrun":
        return read_horovod_line(command, program)
    line = read_line(command[program:])
    options = line.values()
    for name in options:
        if name in _REFUSED:
            raise ConfigError(
                f"torchrun's --{name} cannot be given here: {_REFUSED[name]}; see"
                " docs/local.md#what-happens-to-nodes"
            )
    restarts = options.get("max-restarts", environ.get(VARIABLES["max-restarts"], ""))
    max_restarts = int(restarts) if re.fullmatch(r"\d+", restarts) else None
    slots = _slots(options, environ)
    if line.script == ():
        raise ConfigError("no training script: say which, as in -- torchrun train.py")
    is_file = line.script is not None and not options.keys() & {"module", "no-python"}
    script = line.script[0] if line.script and is_file else None
    return LaunchLine(tuple(command), slots, max_restarts, script, is_module=program > 1)


def _slots(options: Mapping[str, str], environ: Mapping[str, str]) -> int:
    """Return the number of workers that torchrun starts: its option, else its variable, else 1.

    Raises ``ConfigError`` if that is no number.
    """
    name, variable = "nproc-per-node", VARIABLES["nproc-per-node"]
    shown, value = f"--{name}", options.get(name)
    if value is None:
        shown, value = variable, environ.get(variable, "1")
    if not re.fullmatch(r"[1-9]\d*", value):
        raise ConfigError(
            f"{shown}={value}: give a number, because the sidecar registers that many slots"
        )
    return int(value)


def _find_launcher(command: Sequence[str]) -> tuple[str, int]:
    """Return the launcher's name and the number of words that start it; raises ``ConfigError``."""
    program = PurePath(command[0]).name
    if program in _MODULES.values():
        return program, 1
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
    if others and PurePath(first).name in _MODULES.values():
        return f"{command[0]!r} is one word: remove the quotes: -- {command[0]}"
    known = "python" if re.fullmatch(r"python[\d.]*", program) else program
    if known in _WRAPPERS:
        return (
            f"{program} cannot be started here: write torchrun SCRIPT, because {_WRAPPERS[known]}"
        )
    return (
        f"{command[0]}: no launcher that muster local knows; start the training script with "
        "torchrun, python -m torch.distributed.run or horovodrun"
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
