# SPDX-License-Identifier: Apache-2.0
"""The record of what a rank has published of its progress, in the run directory of its pod."""

from __future__ import annotations

from dataclasses import field

from rdzv.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class RankInWorld:
    """The part of a rank in a world that changes in place, as it publishes it."""

    number: int
    """The formed world in which it makes its steps; -1 before the first."""
    step: int
    """Its last step whose state it holds whole; -1 if it holds no whole state."""
    epoch: int = 0
    """The newest change that it has read and obeyed."""
    held: int = 0
    """The change for which it stands at its boundary."""
    broken: int = 0
    """The world of which it has seen a collective fail."""
    formed: int = 0
    """The world in which it is, with its state."""
    failed: tuple[int, str] | None = None
    """The world that it could not form, and why."""
    ready: bool = False
    """Whether it waits to be taken in."""
    over: bool = False
    """Whether its training has ended well."""
    torch: str = ""
    """Its release of torch."""


@dataclass(frozen=True, slots=True)
class RankProgress:
    """The published progress of one rank of this pod.

    The record of a rank that has ended still counts: it passes no further step, and progress does
    not decide whether its round is over.
    """

    local_rank: int
    local_world_size: int
    master: str
    """The name of the rank's round (``LiveRound.master``)."""
    step: int
    """The newest step boundary that it has reached."""
    drain: bool
    """Whether it is within ``muster.drain()``."""
    held: bool
    """Whether it waits at a boundary."""
    acked: tuple[int, int] | None = None
    """(epoch, step) of its newest save."""
    failed: tuple[int, str] | None = None
    """(epoch, reason) of its newest failed save."""
    away: bool = False
    """Whether it is between two blocks of ``muster.drain()``, as while it evaluates; its next
    boundary is in the second."""
    saved: tuple[int, ...] = ()
    """Steps that it has saved, for whatever cause: the newest, and some before."""
    rank: int = 0
    """Its number in the world."""
    cursors: tuple[str, ...] = ()
    """The data cursor of each step of ``saved``, empty for none; no cursors at all if the rank
    gives none."""
    saver: bool = False
    """Whether it saves when a Horovod launcher's drain asks for it."""
    answered: tuple[int, int] | None = None
    """(ask, step) of its newest save of that kind."""
    page: bool = False
    """Whether it reads the gate's page; one of 0.1 reads ``gate.json`` alone."""
    tag: str = ""
    """The save tag that its script has asked for; empty for none."""
    save_s: float = 0.0
    """Seconds that its newest periodic save has taken; 0.0 if that is unknown, or short."""
    samples: str = ""
    """Whether its saves keep the samples, or why not; empty if it does not say."""
    waits: float | None = None
    """The share of its time in which it waits for other ranks; None if that is unknown."""
    in_world: RankInWorld | None = None
    """Its part in a world that changes in place; None if its script takes none."""
    pid: int = field(default=0, compare=False)
    started: int = field(default=0, compare=False)
    """The start of its process, in clock ticks since boot."""
    world_size: int = field(default=0, compare=False)
    restart: int = field(default=0, compare=False)
    epoch: int = field(default=0, compare=False)
    at_unix_s: float = field(default=0.0, compare=False)
    """The time of all this by its wall clock."""
    gives_cursors: bool = field(default=False, compare=False)
    """Whether it gives data cursors, in a file beside the record."""

    def cursor_of(self, step: int) -> str:
        """Return the data cursor that the rank gave with the save of ``step``; empty for none."""
        return dict(zip(self.saved, self.cursors, strict=False)).get(step, "")
