# SPDX-License-Identifier: Apache-2.0
"""horovodrun's command line: what it may not say here, and what it must be told.

Read as Horovod 0.28.1 reads it: a unique beginning of an option stands for the whole, and the
first word that is no option begins the worker's command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rdzv.errors import ConfigError

_COUNTS = "the number of processes follows from --nodes, --min, --max and --slots-per-host"
_HOSTS = "the launcher's sidecar tells which hosts there are; leave it out"
_LOOPBACK = "all nodes are on this machine's loopback; leave it out"
_NO_SSH = "no ssh is used; leave it out"
_GLOO = "an elastic job needs Gloo; leave it out"

_REFUSED = {
    **dict.fromkeys(("-np", "--num-proc", "--min-np", "--min-num-proc"), _COUNTS),
    **dict.fromkeys(("--max-np", "--max-num-proc"), _COUNTS),
    **dict.fromkeys(("-H", "--hosts", "-hostfile", "--hostfile"), _HOSTS),
    "--host-discovery-script": _HOSTS,
    **dict.fromkeys(("--network-interface", "--network-interfaces"), _LOOPBACK),
    **dict.fromkeys(("-p", "--ssh-port", "-i", "--ssh-identity-file"), _NO_SSH),
    **dict.fromkeys(("--mpi", "--jsrun", "--mpi-args", "--tcp", "--binding-args"), _GLOO),
    "--reset-limit": (
        "each join and leave counts against it, so that it ends a job for being elastic; "
        "leave it out"
    ),
}

_DEFAULTS = {
    # Bounds both how long a newcomer may take to start and how long a loss stops the others.
    "--gloo-timeout-seconds": ("30",),
    "--elastic-timeout": ("600",),
    # A container that was started again in its pod may come back; a new pod has a new name.
    "--blacklist-cooldown-range": ("5", "60"),
}

_FLAGS = (
    *("-h", "--help", "-v", "--version", "-cb", "--check-build", "--disable-cache", "--verbose"),
    *("--hierarchical-allreduce", "--no-hierarchical-allreduce", "--hierarchical-allgather"),
    *("--no-hierarchical-allgather", "--torus-allreduce", "--no-torus-allreduce", "--autotune"),
    *("--no-autotune", "--timeline-mark-cycles", "--no-timeline-mark-cycles", "--no-stall-check"),
    *("--stall-check", "--mpi-threads-disable", "--no-mpi-threads-disable", "--gloo"),
    *("--log-with-timestamp", "--log-without-timestamp", "-prefix-timestamp", "--mpi", "--jsrun"),
    *("--prefix-output-with-timestamp", "--log-hide-timestamp", "--no-log-hide-timestamp", "--tcp"),
)
_WITH_VALUE = (
    *("--start-timeout", "--output-filename", "--config-file", "--fusion-threshold-mb"),
    *("--cycle-time-ms", "--cache-capacity", "--autotune-log-file", "--autotune-warmup-samples"),
    *("--autotune-steps-per-sample", "--autotune-bayes-opt-max-samples", "--slots-per-host"),
    *("--autotune-gaussian-process-noise", "--elastic-timeout", "--timeline-filename"),
    *("--stall-check-warning-time-seconds", "--stall-check-shutdown-time-seconds"),
    *("--num-nccl-streams", "--thread-affinity", "--gloo-timeout-seconds", "--log-level"),
)
_WITH_TWO_VALUES = ("--blacklist-cooldown-range",)
_OPTIONS = {*_REFUSED, *_FLAGS, *_WITH_VALUE, *_WITH_TWO_VALUES}


@dataclass(frozen=True, slots=True)
class HorovodLine:
    """horovodrun's command as the user gave it; ``slots`` is its worker processes per node.

    ``program`` are its first words, up to the options; ``given`` the options that it names.
    """

    command: tuple[str, ...]
    slots: int
    program: tuple[str, ...]
    given: frozenset[str]

    def full_command(
        self, discovery: Path, *, nodes: int, min_nodes: int, max_nodes: int
    ) -> tuple[str, ...]:
        """The command with all that horovodrun must be told; ``discovery`` is the script."""
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
    """Check a command of which the first ``program`` words are horovodrun itself.

    Raises ``ConfigError`` with one sentence.
    """
    slots = 1
    given = set()
    words = iter(command[program:])
    for name, value in _options(words):
        if name in _REFUSED:
            raise ConfigError(
                f"horovodrun's {name} cannot be given here: {_REFUSED[name]}; see"
                " docs/local.md#horovodrun"
            )
        if name == "--slots-per-host":
            if not re.fullmatch(r"[1-9]\d{0,3}", value or "", re.ASCII):
                raise ConfigError(
                    f"--slots-per-host {value}: give a number, "
                    "because the sidecar registers that many slots"
                )
            slots = int(value or "")
        given.add(name)
    return HorovodLine(tuple(command), slots, tuple(command[:program]), frozenset(given))


def _options(words: Iterator[str]) -> Iterator[tuple[str, str | None]]:
    """Every option before the worker's command, under its full name."""
    for argument in words:
        if argument == "--" or not argument.startswith("-") or argument == "-":
            return
        given, equals, value = argument.partition("=")
        name = _full_name(given)
        if equals or name in _FLAGS:
            yield name, value if equals else None
        elif name in _WITH_TWO_VALUES:
            next(words, None)
            yield name, next(words, None)
        else:
            yield name, next(words, None)


def _full_name(given: str) -> str:
    if given in _OPTIONS:
        return given
    matches = [option for option in _OPTIONS if option.startswith(given)]
    if len(matches) == 1:
        return matches[0]
    # -p22: a single letter with its value behind it.
    return given[:2] if given[:2] in ("-H", "-p", "-i") else given
