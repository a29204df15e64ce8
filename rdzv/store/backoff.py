# SPDX-License-Identifier: Apache-2.0
"""Exponential backoff with jitter: pure."""

from __future__ import annotations

from random import Random

from rdzv.dataclass import dataclass

MAX_DOUBLINGS = 16
"""Bound on the doublings: far beyond any bound in seconds, and small enough for a float."""


@dataclass(frozen=True, slots=True)
class Doubling:
    """A backoff that doubles with each failure in a row."""

    first_s: float
    """The backoff before any failure, in seconds. Shorter: a brief outage is over sooner for its
    waiters; longer: fewer calls reach a store that is only just back."""
    longest_s: float
    """The bound, in seconds. Shorter: less waiting after a long outage; longer: fewer calls to an
    overloaded store meanwhile."""

    def after(self, failures: int) -> float:
        """Return the backoff without jitter, in seconds."""
        return float(min(self.first_s * 2 ** min(failures, MAX_DOUBLINGS), self.longest_s))

    def drawn_after(self, failures: int, random: Random) -> float:
        """Draw the backoff with jitter: a random time between half of it and all of it."""
        return self.after(failures) * random.uniform(0.5, 1)
