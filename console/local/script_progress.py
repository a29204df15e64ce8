# SPDX-License-Identifier: Apache-2.0
"""The progress of a script: the steps that it reports or, without any, those that it prints.

A printed step is ``step 120``, ``Epoch [3/10], Step [45/100]``, a bar of tqdm, or what the user's
pattern matches: found in bounded time, whatever the output is. Linux only: reads ``/proc``.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from console.local.node import LocalNode
from console.local.processes import children
from console.local.timeline import Progress, Timeline, read_progress
from launcher_shim.rundir import layout
from rdzv.errors import ConfigError

LINE_LENGTH = 600
"""Characters of a line that are searched."""

PIECE_LENGTH = 64 * 1024
"""Characters of new output that are searched at a time: the newest ones."""

FALL_MIN = 3
"""A fall of fewer steps, or of one printed step, is of two ranks that print in turn."""

PATTERN_CPU_S = 0.1
"""Processor time for a user's pattern on one piece. More: the table stands still for longer."""

_STEP = re.compile(
    r"(?<![a-z])(?:global[_ -]?)?(?:step|iteration|iter|batch|update)s?[\"']?\s{0,3}[:=#]?\s{0,6}"
    r"[\[(]?\s{0,6}(\d[\d,]{0,14})(?![.\d]|\s{0,2}%)(?:\s?(?:/|of)\s?(\d[\d,]{0,14}))?",
    re.IGNORECASE,
)
_BAR = re.compile(r"(?<!\d)\d{1,3}%\|[^|]{0,300}\|\s{0,8}(\d{1,12})/(\d{1,12}) ?\[")
_COUNT = re.compile(r"(?<![\d.])(\d{1,12})it \[")
_EPOCH = re.compile(r"(?<![a-z])epoch\s{0,3}[:=#]?\s{0,3}[\[(]?\s{0,3}(\d{1,9})", re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,20}")

DEPTH = 4
"""Generations below the container's first process: muster-run, torchrun, a wrapper, the worker."""


@dataclass(frozen=True, slots=True)
class Printed:
    """A step in one line. ``source`` tells apart what is counted, as two bars; ``total``: its end.

    ``epoch``: that of the line, None without one.
    """

    source: tuple[str, int]
    number: int
    total: int = 0
    epoch: int | None = None


def find_step(line: str) -> Printed | None:
    """Find the step in one line of output."""
    epoch = _EPOCH.search(line)
    of_epoch = None if epoch is None else int(epoch[1])
    if (bar := _BAR.search(line)) is not None:
        label = _NUMBER.sub("#", line[: bar.start()].strip())
        total = int(bar[2])
        return Printed((f"bar {label}", total), int(bar[1]), total, of_epoch)
    if (count := _COUNT.search(line)) is not None:
        return Printed((f"bar {_NUMBER.sub('#', line[: count.start()].strip())}", 0), int(count[1]))
    if (step := _STEP.search(line)) is not None:
        total = _int(step[2]) if step[2] else 0
        return Printed(("word", total), _int(step[1]), total, of_epoch)
    return None


def _int(digits: str) -> int:
    return int(digits.replace(",", ""))


def read_pattern(text: str) -> re.Pattern[str]:
    """Compile a user's pattern, whose first group is the step; raises ``ConfigError``."""
    try:
        pattern = re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"--step {text!r}: no regular expression ({error})") from error
    if not pattern.groups:
        raise ConfigError(
            rf"--step {text!r}: put the number in parentheses, as in --step 'it (\d+)'"
        )
    return pattern


class PatternTooSlow(Exception):
    """A user's pattern that takes too long on a line."""


@contextmanager
def _bounded(cpu_s: float) -> Iterator[None]:
    """Raise ``PatternTooSlow`` in the main thread after ``cpu_s`` of processor time.

    The matcher of ``re`` looks for signals as it runs.
    """

    def too_slow(*_: object) -> None:
        raise PatternTooSlow

    before = signal.signal(signal.SIGVTALRM, too_slow)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


@dataclass(slots=True)
class PrintedSteps:
    """A reader of the steps in the output of all nodes of a run.

    ``fault``: the reason why it has given up, as a sentence. ``every``: the smallest distance of
    two steps that were printed. One source is followed: the first that counts up. Call ``take_in``
    in the main thread.
    """

    pattern: re.Pattern[str] | None = None
    fault: str = ""
    every: int = 0
    _source: tuple[str, int] | None = None
    _first_epoch: int | None = None
    _newest: dict[tuple[str, int], int] = field(default_factory=dict)
    _rests: dict[str, str] = field(default_factory=dict)

    def take_in(self, node: str, text: str) -> list[int]:
        """Take in the next output of a node; return the steps in it, in order."""
        if self.fault:
            return []
        lines = re.split(r"[\r\n]", self._rests.get(node, "") + text[-PIECE_LENGTH:])
        # A bar ends its line by the next one's beginning: read it as it is.
        self._rests[node] = lines[-1][-LINE_LENGTH:]
        if not lines[-1].endswith("]"):
            lines.pop()
        if self.pattern is not None:
            steps = self._by_pattern(self.pattern, lines)
        else:
            found = (find_step(line[:LINE_LENGTH]) for line in lines)
            steps = [self._counted(one) for one in found if one is not None and self._follows(one)]
        return steps

    def _see_distance(self, distance: int) -> None:
        if distance > 0:
            self.every = min(self.every or distance, distance)

    def note_next(self, before: int, after: int) -> None:
        """Take in two steps of one process; one that counts from below again cannot be followed."""
        if before - after > max(FALL_MIN - 1, self.every) and after <= before / 2:
            self.fault = (
                f"the steps in its output fell from {before} to {after} in one world, as if counted"
                " by epoch: what a change costs is unknown; print a step that counts on, or give"
                " --step"
            )
        self._see_distance(after - before)

    def _by_pattern(self, pattern: re.Pattern[str], lines: list[str]) -> list[int]:
        steps = []
        try:
            with _bounded(PATTERN_CPU_S):
                for line in lines:
                    match = pattern.search(line[:LINE_LENGTH])
                    digits = (match[1] or "").replace(",", "") if match is not None else ""
                    if digits.isdecimal() and len(digits) < 16:
                        steps.append(int(digits))
        except PatternTooSlow:
            self.fault = (
                f"--step {pattern.pattern!r} took more than {PATTERN_CPU_S:g} s on a piece of"
                " output: steps are unknown from here on; write a simpler one"
            )
        return steps

    def _follows(self, one: Printed) -> bool:
        """Return whether ``one`` is of the followed source; choose that once one counts up."""
        if self._source is None:
            before = self._newest.get(one.source)
            self._newest[one.source] = one.number
            if before is None or one.number <= before:
                return False
            self._see_distance(one.number - before)
            self._source = one.source
        return one.source == self._source

    def _counted(self, one: Printed) -> int:
        if one.epoch is None or not one.total:
            return one.number
        if self._first_epoch is None:
            self._first_epoch = one.epoch
        return max(0, one.epoch - self._first_epoch) * one.total + one.number


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """One worker: its place in the world, and the address of that world's master."""

    pid: int
    rank: int
    world_size: int
    restart: int
    master: str


def find_workers(first: int) -> list[WorkerProcess]:
    """Find the workers below the process ``first``, by rank."""
    found, level = [], {first}
    for _ in range(DEPTH):
        below: set[int] = set()
        for pid in level:
            worker = _worker(pid)
            if worker is not None:
                found.append(worker)  # its children have its variables, too
            else:
                below |= children(pid)
        level = below
    return sorted(found, key=lambda worker: worker.rank)


def _worker(pid: int) -> WorkerProcess | None:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None  # it has ended
    variables = dict(entry.split(b"=", 1) for entry in environment if b"=" in entry)
    if b"TORCHELASTIC_RUN_ID" not in variables:
        return None
    try:
        return WorkerProcess(
            pid,
            int(variables[b"RANK"]),
            int(variables[b"WORLD_SIZE"]),
            int(variables.get(b"TORCHELASTIC_RESTART_COUNT", b"0")),
            b":".join((variables[b"MASTER_ADDR"], variables[b"MASTER_PORT"])).decode(),
        )
    except (KeyError, ValueError):
        return None


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
