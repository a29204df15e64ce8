# SPDX-License-Identifier: Apache-2.0
"""The records of ranks: what each publishes of its progress, and what a pod's ranks have saved.

A rank publishes in the run directory of its pod. A pod stores what its ranks have saved in their
round, whether or not a drain asked, and what they do while their world stands still.
"""

from __future__ import annotations

import math
from dataclasses import field, replace
from typing import Annotated, Any, Literal, Self, get_args

from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.keys import last_name
from rdzv.records.codec import (
    Samples,
    Seconds,
    Tag,
    UnixTime,
    decode,
    decode_record,
    encode,
    take_cursor,
    taking,
)
from rdzv.store import KeyValue


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
    """Whether it saves when a central launcher's drain asks for it."""
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


Doing = Literal[
    "collective",
    "loader",
    "script",
    "stopped",
    "ended",
    "saves",
    "evaluates",
    "compiles",
    "muster",
    "unknown",
]
"""A rank's activity: it waits in a collective operation for the others, is in its data loader, is
elsewhere in its script, its process is stopped (SIGSTOP) or has ended, it saves, evaluates or
compiles, or waits for Muster. ``unknown``: it gives no stack."""

BUSY: tuple[Doing, ...] = ("saves", "evaluates", "compiles", "muster")
"""Activities that may take minutes while the others wait."""

TEXT_MAX = 100
RANKS_MAX = 64
"""Bound on the ranks of one pod."""


def _brief(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:TEXT_MAX])


Brief = Annotated[str, taking(str, lambda text: True, "", _brief)]
"""One line of bounded length, whatever was written."""

_take_doing = taking(
    str, lambda text: True, "", lambda text: text if text in get_args(Doing) else "unknown"
)


@dataclass(frozen=True, slots=True)
class StillRank:
    """One rank. ``call``: the operation that it waits in, empty if it is in none that is known.

    ``where``: the innermost line of its script, as in ``train.py:31``; empty if unknown. ``via``:
    the lines that led there, the innermost first, as in ``train.py:80, train.py:95``.
    """

    rank: int
    doing: Annotated[Doing, _take_doing]
    call: Brief = ""
    where: Brief = ""
    via: Brief = ""

    @property
    def sentence(self) -> str:
        """Its activity in words that follow "rank 2": ``is stopped``."""
        at = f" ({self.where})" if self.where else ""
        return {
            "collective": f"waits in {self.call}{at}",
            "loader": f"is in its data loader{at}",
            "script": f"is outside of any collective operation{at}",
            "stopped": "is stopped, as by SIGSTOP or a debugger",
            "ended": "has ended",
            "saves": f"saves{at}",
            "evaluates": f"evaluates{at}",
            "compiles": f"compiles{at}",
            "muster": f"waits for Muster{at}",
            "unknown": "gives no stack",
        }[self.doing]

    def as_json(self) -> dict[str, object]:
        """Return it as part of a record."""
        via = {"via": self.via} if self.via else {}
        return {
            "rank": self.rank,
            "doing": self.doing,
            "call": self.call,
            "where": self.where,
            **via,
        }


def _still(found: list[Any]) -> tuple[StillRank, ...]:
    return tuple(decode(StillRank, "a rank", dict(one)) for one in found[:RANKS_MAX])


take_still = taking(list, lambda found: True, "", _still)
"""Takes the ranks of a pod that stand still."""


ROOM = 1.25
"""The grace to advise, beside the longest save."""

CENTRAL_RUN = ""
"""The run of ranks that a central launcher starts: they report their numbers and step alone."""

STEPS_MAX = 8
"""Bound on the steps that one record names; a rank names no more than four."""


_take_steps = taking(
    list,
    lambda steps: len(steps) <= STEPS_MAX and all(type(step) is int for step in steps),
    f"up to {STEPS_MAX} steps",
    tuple,
)
_take_waits = taking(
    list,
    lambda waits: all(type(one) in (int, float) and 0 <= one <= 1 for one in waits),
    "shares of 1",
    lambda waits: tuple(map(float, waits)),
)
_take_cursors = taking(
    list,
    lambda cursors: True,
    "",
    lambda cursors: tuple(take_cursor("a save", {"cursor": one}, "cursor") for one in cursors),
)


@dataclass(frozen=True, slots=True)
class PodSaves:
    """The saves of one pod's ranks in one round.

    ``steps``: those that all of its ranks have saved, the newest first, and not every one of them.
    ``newest``: the newest step that any of them has saved, None before the first. ``step``: the
    boundary that the furthest of them had come to at ``at_unix_s``, by the pod's wall clock, which
    is for people. ``cursors``: the data cursor of each of ``steps``, empty for none; there are no
    cursors at all if the ranks give none. ``ranks`` are the numbers of its ranks. ``tag``: the save
    tag of the paths that they saved to, empty if they have asked for none. ``save_s``: seconds that
    the slowest of their newest saves has taken, if that is longer than its pod has in a drain:
    ``grace_s`` less ``reserve_s``; all three are 0.0 if it is not.
    ``samples``: what its ranks say of the samples of ``steps``, empty for nothing.
    ``waits``: the share of its time in which each of ``ranks`` waits for others; none if one is
    unknown.
    ``still``: what each of its ranks does, if they make no step; ``still_since_unix_s``: their last
    report.
    """

    member: str
    pod_uid: str
    run: str
    round: int
    steps: Annotated[tuple[int, ...], _take_steps] = ()
    newest: int | None = None
    step: int = -1
    at_unix_s: UnixTime = 0.0
    cursors: Annotated[tuple[str, ...], _take_cursors] = ()
    ranks: tuple[int, ...] = ()
    tag: Tag = ""
    save_s: Seconds = 0.0
    grace_s: Seconds = 0.0
    reserve_s: Seconds = 0.0
    samples: Samples = ""
    waits: Annotated[tuple[float, ...], _take_waits] = ()
    still: Annotated[tuple[StillRank, ...], take_still] = ()
    still_since_unix_s: UnixTime = 0.0
    mod_revision: int = 0

    @property
    def too_slow(self) -> str:
        """One sentence on a save that takes longer than a drain has; empty if none does."""
        if not self.save_s:
            return ""
        enough_s = 10 * math.ceil((self.save_s * ROOM + self.reserve_s) / 10)
        return (
            f"saves take {self.save_s:.0f} s, and {self.member} has"
            f" {self.grace_s - self.reserve_s:g} s in a drain (grace {self.grace_s:g} s -"
            f" {self.reserve_s:g} s reserve): drains will expire and lose steps; set"
            f" terminationGracePeriodSeconds and MUSTER_GRACE_S to {enough_s} or more"
        )

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        # What belongs together is written together: sidecars of other versions expect that.
        without: list[str] = ["member"]
        without += [] if self.save_s else ["save_s", "grace_s", "reserve_s"]
        without += [] if self.still else ["still", "still_since_unix_s"]
        without += [] if self.waits else ["waits"]
        rounded: dict[str, Any] = {
            name: round(getattr(self, name), digits)
            for name, digits in (("at_unix_s", 3), ("save_s", 1), ("still_since_unix_s", 3))
            if name not in without
        }
        if self.waits:
            rounded["waits"] = [round(one, 2) for one in self.waits]
        if self.still:
            rounded["still"] = [one.as_json() for one in self.still]
        return encode(self, without=without, **rounded)

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        saves = decode_record(cls, kv, ("steps",), member=last_name(kv.key))
        if len(saves.cursors) not in (0, len(saves.steps)):
            raise RecordError(f"{kv.key}: expected a cursor for each step")
        return saves if len(saves.waits) == len(saves.ranks) else replace(saves, waits=())
