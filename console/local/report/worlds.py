# SPDX-License-Identifier: Apache-2.0
"""The worlds that trained one after the other, and their steps.

A world is one set of ranks. It differs from the next in the process of its rank 0, in its size, or
in its number: with Horovod, and if it changes in place, that process goes on from one to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from console.local.report.progress import Progress
from rdzv.sentences import counted

MAX_POINTS = 600
"""Points kept per world for the picture; beyond it every second one is dropped."""


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
            f"after {gap_s:.1f} s, {cost(before, world)}"
        )


def in_place(before: World, after: World) -> bool:
    """Return whether the one became the other in place: no process was started for it."""
    return before.number > 0 and after.number > 0 and before.master == after.master


def again(before: World, after: World) -> int:
    """Return the number of steps that ``after`` repeats; negative or 0 if none is known to be."""
    # In place the first step that is seen is the one that all have, and not yet one of its own.
    made = 0 if in_place(before, after) else max(before.every, after.every)
    return before.last_step - after.first_step + made


def cost(before: World, after: World) -> str:
    """Say what the change from one world to the next has cost, in steps."""
    steps, exact = again(before, after), before.every == after.every == 1
    how = ", in place" if in_place(before, after) else ""
    if steps <= 0:
        return f"{'no step is lost' if exact else 'no printed step is trained again'}{how}"
    about = "" if exact else "about "
    return f"{about}{counted(steps, 'step')} {'is' if steps == 1 else 'are'} trained again{how}"
