# SPDX-License-Identifier: Apache-2.0
"""The time that one attempt has, and the pause before the next one: pure.

A thousand clients may meet the same slow store. Retries without a backoff make it slower for all;
retries without jitter arrive together.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random

from rdzv.dataclass import dataclass

MAX_DOUBLINGS = 16
"""Bound on the doublings: far beyond any bound in seconds, and small enough for a float."""

FIRST_PAUSE_S = 0.3

BRIEF_IS_STRANGE = 2
"""Warn from this number of registrations in a row that were lost early. One may be chance."""

ATTEMPT_S = 1.0
"""Deadline of one attempt: an election plus one lost attempt fit well into a lease of 10 s."""

MAX_ATTEMPT_S = 1.8
"""Bound on that of an attempt on a slow connection: callers give 2 s by default, and it must be a
whole one."""

ROUND_TRIPS = 6
"""Round trips within one attempt: three for a new connection, one for the call, and two for TCP to
notice that a segment was lost, and to send it again."""

ANSWERS = 8
"""Answers in a row that must have been slow before the connection counts as slow: an election
delays several that came at once, and one fast answer shows that it is over."""


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


@dataclass(frozen=True, slots=True)
class Pacing:
    """The failures, and the registrations that were lost early, in a row."""

    lease_ttl_s: float
    """TTL of the member's lease, in seconds, the bound of the backoff. A longer one: a member is
    back later after a long outage, and fewer attempts reach the store meanwhile."""
    failures: int = 0
    """Attempts that wrote nothing, since the last one that did."""
    brief: int = 0
    """Registrations in a row that were not kept for a lease TTL."""
    since_s: float = 0.0
    """The time at which the first of these was written, or the present one if there is none, in
    seconds."""

    def after_failure(self) -> Pacing:
        """Return the pacing after an attempt that wrote nothing."""
        return replace(self, failures=self.failures + 1)

    def after_registering(self, now_s: float) -> Pacing:
        """Return the pacing after a registration was written."""
        return replace(self, failures=0, since_s=self.since_s if self.brief else now_s)

    def after_loss(self, kept_s: float) -> Pacing:
        """Return the pacing after the loss of a registration that was last renewed at ``kept_s``.

        That is counted up to the last renewal, not up to the end of the lease: a lease that is
        never renewed also lasts for its TTL, and an overloaded store has many of them.
        """
        return replace(self, brief=0 if kept_s >= self.lease_ttl_s else self.brief + 1)

    def pause_s(self, random: Random) -> float:
        """Draw the backoff before the next attempt, in seconds: it doubles, up to one lease TTL."""
        pause = Doubling(FIRST_PAUSE_S, self.lease_ttl_s)
        return pause.drawn_after(max(self.failures, self.brief), random)

    def complaint(self, now_s: float) -> str | None:
        """Return a sentence for the operator if registrations do not last, or None."""
        if self.brief < BRIEF_IS_STRANGE:
            return None
        return (
            f"registered {self.brief} times within {now_s - self.since_s:.1f} s: is another sidecar"
            " running under the same pod UID, or is the store too slow for leases of"
            f" {self.lease_ttl_s:g} s? see"
            " docs/operations.md#a-member-registers-again-and-again"
        )


class Patience:
    """The estimate of the latency of one endpoint, and the timeouts that follow from it.

    An attempt that is given up too early costs more than it saves on a slow connection: its
    replacement begins with a new connection, which takes longer than the answer would have.
    """

    __slots__ = ("_answers_s",)

    def __init__(self) -> None:
        self._answers_s: deque[float] = deque(maxlen=ANSWERS)

    @property
    def attempt_s(self) -> float:
        """The timeout of an attempt, in seconds."""
        answers_s = self._answers_s
        if not answers_s or min(answers_s) * ROUND_TRIPS <= ATTEMPT_S:
            return ATTEMPT_S
        return min(min(answers_s) * ROUND_TRIPS, MAX_ATTEMPT_S)

    def answered(self, took_s: float) -> None:
        """Record the time that an answer took."""
        self._answers_s.append(took_s)

    def missed(self, waited_s: float) -> None:
        """Record that an attempt timed out, in place of the answers before."""
        self._answers_s.clear()
        self._answers_s.append(waited_s)

    def expect(self, other: Patience) -> None:
        """Seed the estimate with the newest answer of the previous connection, if that was slower.

        A network that has become slow is slow for all clients, and this estimate begins with a new
        connection, whose own first answer is better evidence.
        """
        if other._answers_s:
            newest_s = other._answers_s[-1]
            if not self._answers_s or newest_s > min(self._answers_s):
                self._answers_s.clear()
                self._answers_s.append(newest_s)

    def whole(self, waited_s: float) -> bool:
        """Return whether a failed attempt of this length shows that the endpoint is stuck."""
        return waited_s >= self.attempt_s

    def blames(self, waited_s: float) -> bool:
        """Return whether to try another endpoint after a failed attempt of this length.

        The time that is left for an attempt after another one is often less than a slow connection
        needs at all; on a fast one, a short attempt is evidence enough to look elsewhere.
        """
        return waited_s >= ATTEMPT_S or self.attempt_s <= ATTEMPT_S
