# SPDX-License-Identifier: Apache-2.0
"""A watch on the launchers' logs: reports a worker's error at once, and decides when to give up.

torchrun passes its workers' standard error on, and logs ``failed (exitcode: 1) local_rank: 0`` as
soon as it sees one end. A job is given up at the same failure again and again, before any step.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from console.local.job_in_store import RoundFollower
from console.local.node import LocalNode
from console.local.settings import read_delivery
from console.local.timeline import Timeline
from launcher_shim.rundir import layout
from rdzv.records.job import shown_round

_FAILED = re.compile(r"E\d{4} .*\] failed \(exitcode: (-?\d+)\) local_rank: (\d+) ")
_TORCHRUN_LINE = re.compile(r"[IWE]\d{4} \d\d:\d\d:\d\d")
_RANK = re.compile(r"\[rank(\d+)\]: ?")
_TRACEBACK = "Traceback (most recent call last):"
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")

_OF_ANOTHER = re.compile(r"(closed|reset) by peer|[Bb]roken pipe|remote process exited")
"""Errors that a worker raises because another one has ended."""

_BY_TORCHRUN = re.compile(r"SignalException: Process \d+ got signal: (\d+)")
"""The error of a worker that torchrun ends, as its world ends."""

_REFUSAL = re.compile(r"(ValueError|TypeError): (muster\.|MusterCallback\b|batch_plan:)")
"""The errors by which the library refuses a script."""

_FRAME = re.compile(r'  File "(?!<)(.+)", line (\d+)')
_LIBRARY = re.compile(r"(site|dist)-packages/|/lib/python\d|/muster/")
"""The paths of code that is not the user's."""

MAX_SENTENCE = 300

TIMES = 3
"""The number of equal failures, each in a round of its own, that end a job without any step."""

EARLY_S = 60.0
"""A worker that has lived for longer may have trained, even if its script reports no step."""

MAX_PIECE = 1 << 20
"""The most bytes of a log to read at once; the rest waits for the next look."""


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """One worker that ended.

    ``sentence`` is the error that it raised, or its exit status; ``traceback`` ends with the error.

    The worker's own error is before that line; with a process group, torch marks each of its
    lines with ``[rank0]:``.
    """

    local_rank: int
    sentence: str
    traceback: tuple[str, ...] = field(default=(), compare=False)

    @property
    def kind(self) -> str:
        """The sentence without its numbers, which may be ports, addresses or pids."""
        return _NUMBER.sub("#", self.sentence)

    @property
    def follows_another(self) -> bool:
        """Whether the end of another worker is its cause."""
        return _OF_ANOTHER.search(self.sentence) is not None

    @property
    def follows_its_world(self) -> bool:
        """Whether torchrun ended it with its world: no error of its own."""
        return _BY_TORCHRUN.search(self.sentence) is not None

    @property
    def is_refusal(self) -> bool:
        """Whether Muster refused the script, as it will each time."""
        return _REFUSAL.match(self.sentence) is not None

    @property
    def shown(self) -> str:
        """The sentence for people; that of a worker which follows another's end is short."""
        if (ended := _BY_TORCHRUN.search(self.sentence)) is not None:
            return f"torchrun ended it with signal {ended[1]}, as its world ends"
        if (cause := _OF_ANOTHER.search(self.sentence)) is not None:
            return f"it lost another worker ({cause[0]})"
        frames = [
            frame
            for line in self.traceback
            if (frame := _FRAME.match(line)) and not _LIBRARY.search(frame[1])
        ]
        place = f" ({frames[-1][1].rpartition('/')[2]}:{frames[-1][2]})" if frames else ""
        return f"{self.sentence}{place}"


class WorkerErrors:
    """A reader of one launcher's log, piece by piece."""

    def __init__(self) -> None:
        self._rest = ""
        self._tracebacks: dict[str, list[str]] = {}
        self._ended: dict[str, tuple[str, ...]] = {}
        self._last_line = ""

    def take_in(self, text: str) -> list[WorkerFailure]:
        """Take in the next piece of the log; return the failures in it."""
        lines = (self._rest + text).split("\n")
        self._rest = lines.pop()
        return list(self._failures(lines))

    def _failures(self, lines: Iterable[str]) -> Iterator[WorkerFailure]:
        for line in lines:
            if failed := _FAILED.match(line):
                yield self._failure(int(failed[1]), int(failed[2]))
                self._tracebacks.clear()
                self._ended.clear()
                self._last_line = ""
                continue
            if line.strip() and not _TORCHRUN_LINE.match(line):
                self._last_line = line.strip()
            marked = _RANK.match(line)
            speaker = marked[1] if marked else ""
            said = line[marked.end() :] if marked else line
            if said == _TRACEBACK:
                self._tracebacks[speaker] = []
            elif (traceback := self._tracebacks.get(speaker)) is not None and said:
                traceback.append(said)
                if not said.startswith(" "):
                    self._ended[speaker] = tuple(self._tracebacks.pop(speaker))

    def _failure(self, exit_code: int, local_rank: int) -> WorkerFailure:
        # Of several workers with an error, take the first: the others failed because it did.
        lines = next(iter(self._ended.values()), ())
        if lines:
            return WorkerFailure(local_rank, lines[-1][:MAX_SENTENCE], lines)
        sentence = _ended(exit_code)
        if self._last_line:
            sentence += f"; the last line: {self._last_line[:MAX_SENTENCE]}"
        return WorkerFailure(local_rank, sentence)


def _ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"it ended with {exit_code}"
    try:
        return f"it was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"it was killed by signal {-exit_code}"


@dataclass(slots=True)
class SameFailure:
    """A counter of equal failures: ``kind`` is the newest one's, ``rounds`` had it early."""

    kind: str = ""
    rounds: set[int] = field(default_factory=set)

    def see(
        self, failure: WorkerFailure, round_number: int, lived_s: float, *, disturbed: bool
    ) -> bool:
        """Note a failure; return whether to give up the job.

        ``lived_s`` is the time since its round began. A failure that follows another worker's end
        says nothing about the script, and neither does one of a ``disturbed`` round, which a node
        has left.
        """
        if disturbed or failure.follows_another:
            return False
        if lived_s > EARLY_S or failure.kind != self.kind:
            self.rounds.clear()
        self.kind = failure.kind
        if lived_s <= EARLY_S:
            self.rounds.add(round_number)
        return len(self.rounds) >= TIMES


@dataclass(slots=True)
class _Log:
    """The state of reading a launcher's log; ``failures`` are those of process ``pid``."""

    offset: int = 0
    errors: WorkerErrors = field(default_factory=WorkerErrors)
    pid: int = 0
    failures: int = 0


class WorkerWatch:
    """A watch on the logs of one run; ``max_restarts`` is torchrun's, None if the user sets none.

    It keeps the position in each log.
    """

    def __init__(self, timeline: Timeline, rounds: RoundFollower, max_restarts: int | None) -> None:
        self._timeline = timeline
        self._rounds = rounds
        self._max_restarts = max_restarts
        self._logs: dict[Path, _Log] = {}
        self._same = SameFailure()

    def begin(self, log: Path) -> None:
        """Skip what a log contains from an earlier run in the same directory.

        A node that comes back appends to a log that is followed already: nothing is skipped.
        """
        if log not in self._logs:
            self._logs[log] = _Log(offset=log.stat().st_size if log.exists() else 0)

    def look(self, nodes: Iterable[LocalNode]) -> list[tuple[LocalNode, WorkerFailure]]:
        """Read what was appended to the logs since the last look; blocks on the disk."""
        return [(node, failure) for node in nodes for failure in self._new_failures(node)]

    def _new_failures(self, node: LocalNode) -> list[WorkerFailure]:
        log = self._logs[node.launcher_log]
        try:
            with node.launcher_log.open("rb") as file:
                file.seek(log.offset)
                piece = file.read(MAX_PIECE)
        except FileNotFoundError:
            return []
        log.offset += len(piece)
        return log.errors.take_in(piece.decode(errors="replace"))

    def record(self, node: LocalNode, failure: WorkerFailure) -> str | None:
        """Put a failure on the timeline; return the reason to give up the job, or None."""
        log = self._logs[node.launcher_log]
        pid = node.launcher.pid if node.launcher is not None else 0
        allowed = self._allowed(node)
        # One failure more than allowed has ended that torchrun: muster-run has started another.
        log.failures = log.failures + 1 if pid == log.pid and log.failures <= allowed else 1
        log.pid = pid
        number = self._rounds.world.number
        ranks = self._rounds.ranks_of(node.name, newest_world=True)
        has_place = bool(ranks)
        rank = f"local rank {failure.local_rank}"
        if failure.local_rank < len(ranks):  # a torchrun that the script starts may have more
            rank = f"rank {ranks[failure.local_rank]}"
        where = [f"round {shown_round(number)}"] if has_place else []
        if log.failures <= allowed:
            where.append(f"restart {log.failures} of {allowed}")
        elif allowed:
            where.append("no restart of torchrun is left")
        note = f" ({', '.join(where)})" if where else ""
        what = "ended" if failure.follows_its_world else "error"
        self._timeline.record("node", what, node.name, f"{rank}: {failure.shown}{note}")
        began_s = self._rounds.began_s
        if not has_place or self._timeline.worlds.all or began_s is None:
            return None
        lived_s = self._timeline.now_s() - began_s
        disturbed = self._timeline.disturbed_since(began_s)
        if failure.is_refusal:
            return f"muster refuses the script before any step: {failure.sentence}"
        if not self._same.see(failure, number, lived_s, disturbed=disturbed):
            return None
        return f"the same error {TIMES} times before any step: {failure.sentence}"

    def _allowed(self, node: LocalNode) -> int:
        """Return how many times torchrun restarts its workers: the user's number or Muster's."""
        if self._max_restarts is not None:
            return self._max_restarts
        try:
            delivered = read_delivery((node.run_dir / layout.ENVIRONMENT).read_text())
        except FileNotFoundError:
            return 0
        return int(delivered.get("PET_MAX_RESTARTS", 0))
