# SPDX-License-Identifier: Apache-2.0
"""The worlds of a job, as the step lines of its workers tell them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path


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

    def pauses(self, since_s: float, until_s: float) -> list[tuple[float, float]]:
        """The times without a step between two moments."""
        moments = [since_s, *(at for at in self.steps_s if since_s < at < until_s), until_s]
        return list(pairwise(moments))


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
