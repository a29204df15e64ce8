# SPDX-License-Identifier: Apache-2.0
"""A watch on the launchers' logs: reports a worker's error at once, and decides when to give up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from console.local.launch.settings import read_delivery
from console.local.nodes.node import LocalNode
from console.local.report.rounds import RoundFollower
from console.local.report.same_failure import TIMES, SameFailure
from console.local.report.timeline import Timeline
from console.local.report.worker_errors import WorkerErrors, WorkerFailure
from launcher_shim.rundir import layout
from rdzv.records.history import shown_round

MAX_PIECE = 1 << 20
"""The most bytes of a log to read at once; the rest waits for the next look."""


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
