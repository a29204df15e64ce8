# SPDX-License-Identifier: Apache-2.0
"""The rule for giving up a job: the same failure again and again, before any step. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from console.local.report.worker_errors import WorkerFailure

TIMES = 3
"""The number of equal failures, each in a round of its own, that end a job without any step."""

EARLY_S = 60.0
"""A worker that has lived for longer may have trained, even if its script reports no step."""


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
