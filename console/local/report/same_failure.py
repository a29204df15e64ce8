# SPDX-License-Identifier: Apache-2.0
"""When a job is given up: the same failure again and again, before any step. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from console.local.report.worker_errors import WorkerFailure

TIMES = 3
"""Equal failures, in as many rounds, that end a job which has made no step."""

EARLY_S = 60.0
"""A worker that has lived for longer may have trained, also where its script tells no step."""


@dataclass(slots=True)
class SameFailure:
    """Counts; ``kind`` is the newest failure's, ``rounds`` those in which it came at once."""

    kind: str = ""
    rounds: set[int] = field(default_factory=set)

    def see(
        self, failure: WorkerFailure, round_number: int, lived_s: float, *, disturbed: bool
    ) -> bool:
        """Note a failure; returns whether the job is to be given up.

        ``lived_s`` is the time since its round began. A failure that follows another worker's end
        says nothing about the script, and neither does one of a ``disturbed`` round, from which a
        node has gone.
        """
        if disturbed or failure.follows_another:
            return False
        if lived_s > EARLY_S or failure.kind != self.kind:
            self.rounds.clear()
        self.kind = failure.kind
        if lived_s <= EARLY_S:
            self.rounds.add(round_number)
        return len(self.rounds) >= TIMES
