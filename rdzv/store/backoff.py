# SPDX-License-Identifier: Apache-2.0
"""Exponential backoff with jitter: pure."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

MAX_DOUBLINGS = 16
"""Far beyond any bound, and small enough for a float."""


@dataclass(frozen=True, slots=True)
class Doubling:
    """``first_s`` seconds before any failure, then twice as long after each, up to ``longest_s``.

    Failures are counted in a row.
    """

    first_s: float
    longest_s: float

    def after(self, failures: int) -> float:
        """The backoff without jitter, in seconds."""
        return float(min(self.first_s * 2 ** min(failures, MAX_DOUBLINGS), self.longest_s))

    def drawn_after(self, failures: int, random: Random) -> float:
        """The backoff with jitter: a random time between half of it and all of it."""
        return self.after(failures) * random.uniform(0.5, 1)
