# SPDX-License-Identifier: Apache-2.0
"""The course of a run: its moments in order, and the worlds that trained one after the other.

A world is one set of ranks. It differs from the next in the process of its rank 0, in its size, or
in its number: with a central launcher, and if it changes in place, that process is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from agent.rundir.reports import is_gone, read_lines
from rdzv.records.progress import RankProgress
from rdzv.sentences import counted

MAX_POINTS = 600
"""Points kept per world for the picture; beyond it every second one is dropped."""

SCHEMA = 1

FINISHED = "job finished"
"""The detail of the moment ``closed`` of a job that ended well."""

_DISTURBANCES = ("leave", "lost", "released", "drained", "killed", "error")


@dataclass(frozen=True, slots=True)
class Progress:
    """One rank at one moment.

    ``at_unix_s`` is this machine's wall clock. ``every``: more than 1 if only each so manieth step
    is known, as of a script that prints them. ``master``: the name of its round. ``world``: the
    number of the world in that round that has formed in place; 0 for none.
    """

    pid: int
    rank: int
    world_size: int
    restart: int
    step: int
    at_unix_s: float
    every: int = 1
    master: str = ""
    world: int = 0


def read_progress(directory: Path) -> tuple[Progress, ...]:
    """Read the progress of the live ranks that have reached a step boundary, by rank."""
    ranks = (_of(line) for line in read_lines(directory) if line.step >= 0 and not is_gone(line))
    return tuple(sorted(ranks, key=lambda progress: progress.rank))


def _of(line: RankProgress) -> Progress:
    counts = (line.rank, line.world_size, line.restart, line.step)
    place = line.in_world
    world = 0 if place is None else max(0, place.number, place.formed)
    return Progress(line.pid, *counts, line.at_unix_s, master=line.master, world=world)


def newest_rank_0(everybody: Iterable[Progress]) -> Progress | None:
    """Return rank 0 of the present world: the latest to report, if an old one has not ended."""
    leaders = [progress for progress in everybody if progress.rank == 0]
    return max(leaders, key=lambda progress: progress.at_unix_s, default=None)


@dataclass(slots=True)
class World:
    """One world.

    ``points`` are (seconds since the start of the run, step), oldest first. ``every``: only each so
    manieth step is known. ``master``, ``number``: of a world that has formed in place, its round
    and its number there.
    """

    pid: int
    size: int
    every: int = 1
    master: str = ""
    number: int = 0
    points: list[tuple[float, int]] = field(default_factory=list)

    @property
    def began_s(self) -> float:
        """The time at which its first step was seen."""
        return self.points[0][0]

    @property
    def ended_s(self) -> float:
        """The time at which its last step was seen."""
        return self.points[-1][0]

    @property
    def first_step(self) -> int:
        """The first step that was seen."""
        return self.points[0][1]

    @property
    def last_step(self) -> int:
        """The last step that was seen."""
        return self.points[-1][1]

    def is_of(self, leader: Progress) -> bool:
        """Return whether rank 0's progress is of this world; it gets its number as it forms."""
        same = (self.pid, self.size) == (leader.pid, leader.world_size)
        return same and (0 in (leader.world, self.number) or leader.world == self.number)

    def see(self, at_s: float, step: int) -> None:
        """Add a point if the step has changed."""
        if self.points and self.points[-1][1] == step:
            return
        self.points.append((at_s, step))
        if len(self.points) > MAX_POINTS:
            del self.points[1:-1:2]


class Worlds:
    """Every world of a run, in order.

    ``fault``: the reason why their steps do not count on from world to world; empty if they do.

    A world differs from the next in the process of its rank 0, in its size, or in its number: with
    a central launcher, and if it changes in place, that process goes on from one to the next.
    """

    def __init__(self) -> None:
        self.all: list[World] = []
        self.fault = ""

    def first_of(self, size: int, start: int) -> int | None:
        """Return the index of the first world of ``size`` ranks from ``start`` on; None if none."""
        later = range(start, len(self.all))
        return next((index for index in later if self.all[index].size == size), None)

    @property
    def steps_trained_again(self) -> int:
        """The number of steps that a later world has repeated, as far as they were seen."""
        return sum(max(0, again(before, after)) for before, after in pairwise(self.all))

    @property
    def exact(self) -> bool:
        """Whether each step was reported or printed."""
        return all(world.every == 1 for world in self.all)

    def see(self, at_s: float, leader: Progress) -> str | None:
        """Take in rank 0's progress; return a sentence if a world has just begun to train."""
        before = self.all[-1] if self.all else None
        if before is not None and before.is_of(leader):
            before.see(at_s, leader.step)
            before.every = leader.every
            before.number = before.number or leader.world
            return None
        goes_on = before is not None and before.pid == leader.pid
        if not goes_on and any(world.pid == leader.pid for world in self.all):
            return None  # the rank 0 of an earlier world, which has not ended yet
        world = World(leader.pid, leader.world_size, leader.every, leader.master, leader.world)
        world.see(at_s, leader.step)
        self.all.append(world)
        if before is None:
            return f"first step: {world.first_step} in a world of {world.size}"
        gap_s = world.began_s - before.ended_s
        return (
            f"trains again at step {world.first_step} in a world of {world.size} "
            f"after {gap_s:.1f} s, {cost_between(before, world)}"
        )


def in_place(before: World, after: World) -> bool:
    """Return whether the one became the other in place: no process was started for it."""
    return before.number > 0 and after.number > 0 and before.master == after.master


def again(before: World, after: World) -> int:
    """Return the number of steps that ``after`` repeats; negative or 0 if none is known to be."""
    # In place the first step that is seen is the one that all have, and not yet one of its own.
    made = 0 if in_place(before, after) else max(before.every, after.every)
    return before.last_step - after.first_step + made


def cost_between(before: World, after: World) -> str:
    """Say what the change from one world to the next has cost, in steps."""
    steps, exact = again(before, after), before.every == after.every == 1
    how = ", in place" if in_place(before, after) else ""
    if steps <= 0:
        return f"{'no step is lost' if exact else 'no printed step is trained again'}{how}"
    about = "" if exact else "about "
    return f"{about}{counted(steps, 'step')} {'is' if steps == 1 else 'are'} trained again{how}"


Kind = Literal["event", "node", "membership", "round", "training", "end"]


@dataclass(frozen=True, slots=True)
class Moment:
    """One thing that happened. ``kind`` is its group; ``what`` is one word.

    ``asked``: of an event, as the user wrote it: two runs may have it hit nodes of other names.
    """

    at_s: float
    kind: Kind
    what: str
    who: str
    detail: str
    had_effect: bool = True
    asked: str = ""

    @property
    def disturbs(self) -> bool:
        """Whether it may keep a world from training on."""
        if self.kind == "event":
            return self.had_effect and self.what not in ("add", "cont", "kill-sidecar")
        return self.what in _DISTURBANCES

    @property
    def label(self) -> str:
        """A short name of what was done, and to whom: that of a drain by hand is of its release."""
        what = "drain" if self.what == "released" else self.what
        who = "" if self.what in ("pause", "resume", "set") else self.who
        return f"{what} {who}".strip()

    def to_json(self) -> dict[str, object]:
        """Return the moment's fields for JSON output."""
        return {
            "at_s": round(self.at_s, 3),
            "kind": self.kind,
            "what": self.what,
            "who": self.who,
            "detail": self.detail,
        }

    def __str__(self) -> str:
        return f"{self.at_s:7.1f} s  {self.what:<10} {self.who:<9} {self.detail}".rstrip()


class Timeline:
    """The collected moments; ``clock`` is monotonic, and ``on_record`` is called with each one.

    ``rounds`` are (seconds since the start, ranks that the rendezvous agreed on; 0: none agreed).
    """

    def __init__(self, clock: Callable[[], float], on_record: Callable[[Moment], None]) -> None:
        self._clock = clock
        self._started_s = clock()
        self._on_record = on_record
        self.moments: list[Moment] = []
        self.worlds = Worlds()
        self.rounds: list[tuple[float, int]] = []

    def now_s(self) -> float:
        """Return the seconds since the run began."""
        return self._clock() - self._started_s

    def record(
        self,
        kind: Kind,
        what: str,
        who: str,
        detail: str,
        *,
        had_effect: bool = True,
        asked: str = "",
    ) -> None:
        """Add a moment that happens now; an event may have had no effect."""
        moment = Moment(self.now_s(), kind, what, who, detail, had_effect, asked)
        self.moments.append(moment)
        self._on_record(moment)

    def record_round(self, ranks: int) -> None:
        """Note that the rendezvous agrees on this number of ranks from now on."""
        if (self.rounds[-1][1] if self.rounds else 0) != ranks:
            self.rounds.append((self.now_s(), ranks))

    @property
    def events_without_effect(self) -> list[Moment]:
        """The events that did nothing: their node was not there, or their world never formed."""
        return [moment for moment in self.moments if not moment.had_effect]

    def trusted_until(self, begin_s: float, end_s: float) -> float:
        """Return the time until which a round without reported steps surely trained.

        That is its first disturbance, or ``end_s`` if there was none.
        """
        disturbed = (moment.at_s for moment in self.moments if moment.disturbs)
        return next((at_s for at_s in disturbed if begin_s < at_s < end_s), end_s)

    def disturbed_since(self, at_s: float) -> bool:
        """Return whether an event or a departure, not just a script's error, followed ``at_s``."""
        return any(
            moment.disturbs and moment.what != "error"
            for moment in self.moments
            if moment.at_s >= at_s
        )

    def to_json(self, command: tuple[str, ...], status: int) -> dict[str, object]:
        """Return the timeline for JSON output, with the command and its exit status."""
        return {
            "schema": SCHEMA,
            "command": command,
            "status": status,
            "duration_s": round(self.now_s(), 3),
            "moments": [moment.to_json() for moment in self.moments],
            "rounds": [[round(at_s, 3), ranks] for at_s, ranks in self.rounds],
            "worlds": [
                {
                    "size": world.size,
                    "points": [[round(at_s, 3), step] for at_s, step in world.points],
                }
                for world in self.worlds.all
            ],
        }
