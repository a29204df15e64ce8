# SPDX-License-Identifier: Apache-2.0
"""One line of a training container: its time, a text that no terminal acts on, and its ranks. Pure.

The ranks follow from the pod that wrote it and the launcher's own prefix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from agent.telemetry.logs import printable
from launcher_shim.pod.launchers import CENTRAL
from rdzv.errors import ConfigError

_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d) ?")
_COLOURS = re.compile(r"\x1b\[[\d;:]*m")

_TEE = re.compile(r"\[[A-Za-z_-]*?(\d+)\]:")
"""The prefix of torchrun with ``--tee``: the role, and the local rank."""
_OF_CENTRAL = re.compile(CENTRAL.prefix)

LAST = -1
"""The last rank of whichever world it is."""


@dataclass(frozen=True, slots=True)
class Source:
    """One container. ``also``: its name, if it is not the only one of its pod that is shown."""

    member: str
    also: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One line. ``source``: the container that wrote it, as ``Source`` names it."""

    at_unix_ns: int
    source: Source
    text: str


def stamped(line: str, otherwise_unix_ns: int) -> tuple[int, str]:
    """Split a line of the kubelet into its time and its text.

    ``otherwise_unix_ns``: the time of a line without one, as a piece of a longer line is.
    """
    found = _STAMP.match(line)
    if found is None:
        return otherwise_unix_ns, line
    whole, fraction, zone = found.groups()
    try:
        moment = datetime.fromisoformat(whole + zone.replace("Z", "+00:00"))
    except ValueError:
        return otherwise_unix_ns, line
    nanoseconds = int((fraction or ".")[1:].ljust(9, "0")[:9])
    return int(moment.timestamp()) * 10**9 + nanoseconds, line[found.end() :]


def shown(text: str) -> str:
    """Return what to print of a line of a tenant: no control character but tabs.

    Colours are left out. A bar that was drawn over and over in one line is shown as drawn last.
    """
    text = _COLOURS.sub("", text).rstrip("\r\n").rpartition("\r")[2]
    return "\t".join(map(printable, text.split("\t")))


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a line: ranks ``first`` to ``last``, or a pod that has none in its world."""

    source: Source
    first: int | None = None
    last: int | None = None

    @property
    def label(self) -> str:
        """The prefix: ``[2]`` of one rank, ``[0-7]`` of a node's ranks, ``[NAME]`` of a pod."""
        also = f" {self.source.also}" if self.source.also else ""
        if self.first is None:
            return f"[{self.source.member}{also}]"
        ranks = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        return f"[{ranks}{also}]"


@dataclass(frozen=True, slots=True)
class Seating:
    """The first rank and the number of ranks of each member of one world, in rank order."""

    seats: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, members: Sequence[str], slots: Mapping[str, int]) -> Seating:
        """Seat ``members``, which are in rank order. ``slots``: the ranks of each, 1 if unknown.

        Of a member that has gone, it is taken that it had as many as the others have.
        """
        usual = max(slots.values(), default=1)
        seats, first = {}, 0
        for name in members:
            size = slots.get(name, usual)
            seats[name] = (first, size)
            first += size
        return cls(seats)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(size for _, size in self.seats.values())

    def origin(self, source: Source, text: str) -> tuple[Origin, str]:
        """Return where a line is from, and the line without the launcher's own prefix."""
        seat = self.seats.get(source.member)
        if seat is None:
            printed = _OF_CENTRAL.match(text)
            if printed is None:
                return Origin(source), text
            return Origin(source, int(printed[1]), int(printed[1])), text[printed.end() :]
        first, size = seat
        teed = _TEE.match(text)
        if teed is not None and int(teed[1]) < size:
            rank = first + int(teed[1])
            return Origin(source, rank, rank), text[teed.end() :]
        return Origin(source, first, first + size - 1), text

    def has(self, origin: Origin, rank: int | None) -> bool:
        """Return whether a line of ``origin`` may be of ``rank``; None: of any, and of no rank."""
        if rank is None:
            return True
        if origin.first is None or origin.last is None:
            return False
        wanted = self.size - 1 if rank == LAST else rank
        return origin.first <= wanted <= origin.last


NOBODY = Seating({})


def rank_of(text: str) -> int | None:
    """Read ``--rank``: a number, ``last``, or ``all``, which is None."""
    if text == "all":
        return None
    if text == "last":
        return LAST
    if text.isdecimal():
        return int(text)
    raise ConfigError(f"--rank {text!r}: give a rank such as 0, or last, or all")
