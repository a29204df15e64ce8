# SPDX-License-Identifier: Apache-2.0
"""horovodrun's command line: the options that are refused here, and those that are added."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher_shim.pod.horovod_line import (
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
from rdzv.errors import ConfigError

_COUNTS = "the number of processes follows from --nodes, --min, --max and --slots-per-host"
_HOSTS = "the launcher's sidecar tells which hosts there are; leave it out"
_LOOPBACK = "all nodes are on this machine's loopback; leave it out"

_REFUSED = {
    **REFUSED,
    **dict.fromkeys((*PROCESSES, *LEAST, *MOST), _COUNTS),
    DISCOVERY: _HOSTS,
    **dict.fromkeys(INTERFACE, _LOOPBACK),
}

# On one machine a newcomer's imports are cached, so a loss need not stop the others for long.
_DEFAULTS = {**DEFAULTS, GLOO_TIMEOUT: ("30",)}


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
        if name in _REFUSED:
            raise ConfigError(
                f"horovodrun's {name} cannot be given here: {_REFUSED[name]}; see"
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
