# SPDX-License-Identifier: Apache-2.0
"""Adaptive timeout of one attempt at one endpoint, from its latest answers: pure."""

from __future__ import annotations

from collections import deque

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
