# SPDX-License-Identifier: Apache-2.0
"""The progress of a script: the steps that it reports or, without any, those that it prints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from console.local.nodes.node import LocalNode
from console.local.report.printed_steps import PIECE_LENGTH, PrintedSteps
from console.local.report.progress import Progress, read_progress
from console.local.report.timeline import Timeline
from console.local.report.worker_processes import WorkerProcess, find_workers
from launcher_shim.rundir import layout


@dataclass(slots=True)
class _Node:
    """The output of one node: how far it is read, its newest step, and whose that is."""

    offset: int = 0
    pid: int = 0
    step: int | None = None
    at_unix_s: float = 0.0


@dataclass(slots=True)
class Look:
    """The new output of a node and its workers at that time."""

    name: str
    workers: list[WorkerProcess]
    text: str


@dataclass(slots=True)
class PrintedProgress:
    """A follower of the output of all nodes."""

    steps: PrintedSteps
    _nodes: dict[Path, _Node] = field(default_factory=dict)

    def begin(self, log: Path) -> None:
        """Skip what a log contains from an earlier run in the same directory."""
        if log not in self._nodes:
            self._nodes[log] = _Node(offset=log.stat().st_size if log.exists() else 0)

    def look(self, nodes: Iterable[LocalNode]) -> list[tuple[Path, Look]]:
        """Read what is new; blocks on the disk. Workers first: they wrote nothing before that."""
        return [(node.launcher_log, self._look(node)) for node in nodes]

    def _look(self, node: LocalNode) -> Look:
        launcher = node.launcher
        alive = launcher is not None and launcher.returncode is None
        workers = find_workers(launcher.pid) if launcher is not None and alive else []
        read = self._nodes[node.launcher_log]
        try:
            with node.launcher_log.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(read.offset, size - PIECE_LENGTH))
                piece = file.read(PIECE_LENGTH)
                read.offset = file.tell()  # the output may have grown meanwhile
        except FileNotFoundError:
            return Look(node.name, workers, "")
        return Look(node.name, workers, piece.decode(errors="replace"))

    def take_in(self, looks: Iterable[tuple[Path, Look]]) -> Mapping[str, tuple[Progress, ...]]:
        """Return the progress of the workers of each node whose world has printed a step."""
        looks = tuple(looks)
        for log, look in looks:
            self._see(self._nodes[log], look)
        if self.steps.fault:
            return {}
        newest: dict[str, _Node] = {}
        for log, look in looks:
            read = self._nodes[log]
            for worker in look.workers[:1]:
                before = newest.get(worker.master)
                if read.step is not None and (before is None or before.at_unix_s < read.at_unix_s):
                    newest[worker.master] = read
        return {
            look.name: tuple(
                self._progress(worker, self._nodes[log], newest[worker.master])
                for worker in look.workers
                if worker.master in newest
            )
            for log, look in looks
        }

    def _see(self, read: _Node, look: Look) -> None:
        steps = self.steps.take_in(look.name, look.text)
        pid = look.workers[0].pid if look.workers else 0
        if pid != read.pid:
            # The output up to here is of the workers before, unless it counts from below again.
            steps = steps if read.step is None else _after_fall(steps, read.step)
            read.pid, read.step = pid, None
        if not steps or not pid:
            return
        known = steps if read.step is None else [read.step, *steps]
        for before, after in pairwise(known):
            self.steps.note_next(before, after)
        read.step, read.at_unix_s = steps[-1], time.time()

    def _progress(self, worker: WorkerProcess, own: _Node, newest: _Node) -> Progress:
        read = newest if own.step is None or worker.rank == 0 else own
        assert read.step is not None
        return Progress(
            worker.pid,
            worker.rank,
            worker.world_size,
            worker.restart,
            read.step,
            read.at_unix_s,
            every=self.steps.every or 1,
        )


def _after_fall(steps: list[int], highest: int) -> list[int]:
    for index, step in enumerate(steps):
        if step < highest:
            return steps[index:]
        highest = step
    return []


class StepReader:
    """A reader of all nodes' steps. ``printed``: None where printed steps are of no use."""

    def __init__(self, printed: PrintedProgress | None, timeline: Timeline) -> None:
        self._printed = printed
        self._timeline = timeline

    def begin(self, log: Path) -> None:
        """Skip what a log contains from an earlier run; blocks on the disk."""
        if self._printed is not None:
            self._printed.begin(log)

    async def read(self, nodes: Mapping[str, LocalNode]) -> Mapping[str, tuple[Progress, ...]]:
        """Return the steps that scripts report or, until one does, those that they print."""
        present = dict(nodes)
        reported = await asyncio.to_thread(_reported, present)
        if any(reported.values()):
            self._printed = None
        if self._printed is None:
            return reported
        looks = await asyncio.to_thread(self._printed.look, tuple(present.values()))
        progress, steps = self._printed.take_in(looks), self._printed.steps
        if steps.fault:
            self._timeline.worlds.fault, self._printed = steps.fault, None
            self._timeline.record("training", "steps", "", f"unknown: {steps.fault}")
        return progress


def _reported(nodes: Mapping[str, LocalNode]) -> dict[str, tuple[Progress, ...]]:
    return {name: read_progress(node.run_dir / layout.PROGRESS) for name, node in nodes.items()}
