# SPDX-License-Identifier: Apache-2.0
"""The worlds of a job, as the step lines of its workers tell them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.waiting import Timeline

STEPS_TIMEOUT_S = 120.0
"""For some steps of a world, and a second more for each."""


def step_lines(directory: Path) -> Iterator[tuple[float, int, int]]:
    """Moment, step, and number of the world, of each whole line of any worker."""
    for path in directory.iterdir():
        whole, _, _ = path.read_text().rpartition("\n")  # half a line may be the last
        for line in whole.splitlines():
            at_s, step, *_, world = line.split()
            yield float(at_s), int(step), int(world)


@dataclass(frozen=True)
class Worker:
    """One rank of one world."""

    node: str
    pid: int
    restarts: int


@dataclass
class World:
    """Workers that have drawn one number together. Times are monotonic, in seconds."""

    number: int
    size: int
    workers: dict[int, Worker] = field(default_factory=dict)
    steps_s: list[float] = field(default_factory=list)
    _earliest: dict[int, tuple[int, float]] = field(default_factory=dict)

    def add(self, at_s: float, step: int, rank: int, worker: Worker) -> None:
        """Take in one line. A step is made once its all_reduce is over anywhere."""
        self.workers[rank] = worker
        count, earliest_s = self._earliest.get(step, (0, at_s))
        self._earliest[step] = (count + 1, min(earliest_s, at_s))
        if count + 1 == self.size:
            self.steps_s.append(self._earliest.pop(step)[1])

    @property
    def began_s(self) -> float:
        """When its first whole step was made."""
        return self.steps_s[0]

    @property
    def ended_s(self) -> float:
        """When its last whole step was made."""
        return self.steps_s[-1]

    @property
    def nodes(self) -> set[str]:
        """Names of the nodes in it."""
        return {worker.node for worker in self.workers.values()}

    @property
    def pids(self) -> set[int]:
        """Processes of its workers."""
        return {worker.pid for worker in self.workers.values()}

    @property
    def restarts(self) -> int:
        """Most restarts that torch has counted on one of its nodes."""
        return max(worker.restarts for worker in self.workers.values())


class StepLog:
    """Reads the files of all workers as they grow."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._worlds: dict[int, World] = {}
        self._read: dict[Path, int] = {}

    def worlds(self) -> list[World]:
        """Every world that has made a step, in the order of their first."""
        for path in self.directory.iterdir():
            at = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(at)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read[path] = at + len(whole) + len(newline)
            for line in whole.decode().splitlines():
                self._take(path.name.rpartition(".")[0], line)
        begun = [world for world in self._worlds.values() if world.steps_s]
        return sorted(begun, key=lambda world: world.began_s)

    def _take(self, node: str, line: str) -> None:
        at_s, step, rank, size, restarts, pid, number = line.split()
        world = self._worlds.setdefault(int(number), World(int(number), int(size)))
        world.add(float(at_s), int(step), int(rank), Worker(node, int(pid), int(restarts)))


class Training(Timeline):
    """What is seen of a job by its steps."""

    steps: StepLog

    def world(self) -> World | None:
        """The newest world, if it has made a step within the last second."""
        worlds = self.steps.worlds()
        if worlds and time.monotonic() - worlds[-1].ended_s < 1.0:
            return worlds[-1]
        return None

    def until_world(
        self, fits: Callable[[World], bool], timeout_s: float, what: str, not_: World | None
    ) -> World:
        """Wait until a whole world steps that fits, other than ``not_``; return it."""
        world: World | None = None

        def formed() -> bool:
            nonlocal world
            world = self.world()
            if world is None or (not_ is not None and world.number == not_.number):
                return False
            return len(world.workers) == world.size and fits(world)

        self.until(formed, timeout_s, what)
        assert world is not None
        self.tell(f"a world of {world.size} steps: {', '.join(sorted(world.nodes))}")
        return world

    def goes_on(self, world: World, steps: int = 20) -> None:
        """Wait until ``world`` has made so many more steps."""
        goal = len(world.steps_s) + steps
        self.until(
            lambda: self.steps.worlds() and len(world.steps_s) >= goal,
            STEPS_TIMEOUT_S + steps,
            f"the world makes {steps} more steps",
        )

    def moments(self) -> Iterator[tuple[float, str]]:
        yield from super().moments()
        for world in self.steps.worlds():
            nodes = ", ".join(sorted(world.nodes))
            yield world.began_s, f"first step of a world of {world.size}: {nodes}"
            yield world.ended_s, f"last step of it, its {len(world.steps_s)}th"
