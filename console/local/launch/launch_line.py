# SPDX-License-Identifier: Apache-2.0
"""The command after ``--``: its launcher, and the options that are refused here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from console.local.launch.horovod_line import HorovodLine, read_horovod_line
from launcher_shim.pod.torchrun_options import VARIABLES, read_line
from rdzv.errors import ConfigError

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
