# SPDX-License-Identifier: Apache-2.0
"""The worlds that trained one after the other, and their steps.

A world is one set of ranks. It differs from the next in the process of its rank 0 or in its size:
with Horovod that process goes on from one world to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from console.local.report.progress import Progress

MAX_POINTS = 600
"""Points kept per world for the picture; beyond it every second one is dropped."""


@dataclass(slots=True)
class World:
    """One world. ``points`` are (seconds since the start of the run, step), oldest first."""

    pid: int
    size: int
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

    def see(self, at_s: float, step: int) -> None:
        """Add a point if the step has changed."""
        if self.points and self.points[-1][1] == step:
            return
        self.points.append((at_s, step))
        if len(self.points) > MAX_POINTS:
            del self.points[1:-1:2]


class Worlds:
    """Every world of a run, in order."""

    def __init__(self) -> None:
        self.all: list[World] = []

    def first_of(self, size: int, start: int) -> int | None:
        """Return the index of the first world of ``size`` ranks from ``start`` on; None if none."""
        later = range(start, len(self.all))
        return next((index for index in later if self.all[index].size == size), None)

    @property
    def steps_trained_again(self) -> int:
        """The number of steps that a later world has repeated, as far as they were seen."""
        pairs = zip(self.all, self.all[1:], strict=False)
        return sum(max(0, before.last_step - after.first_step + 1) for before, after in pairs)

    def see(self, at_s: float, leader: Progress) -> str | None:
        """Take in rank 0's progress; return a sentence if a world has just begun to train."""
        before = self.all[-1] if self.all else None
        if before is not None and before.pid == leader.pid and before.size == leader.world_size:
            before.see(at_s, leader.step)
            return None
        goes_on = before is not None and before.pid == leader.pid
        if not goes_on and any(world.pid == leader.pid for world in self.all):
            return None  # the rank 0 of an earlier world, which has not ended yet
        world = World(leader.pid, leader.world_size)
        world.see(at_s, leader.step)
        self.all.append(world)
        if before is None:
            return f"first step: {world.first_step} in a world of {world.size}"
        gap_s = world.began_s - before.ended_s
        again = before.last_step - world.first_step + 1
        steps = "step is" if again == 1 else "steps are"
        lost = f", {again} {steps} trained again" if again > 0 else ", no step is lost"
        return (
            f"trains again at step {world.first_step} in a world of {world.size} "
            f"after {gap_s:.1f} s{lost}"
        )
