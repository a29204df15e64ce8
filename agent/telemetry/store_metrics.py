# SPDX-License-Identifier: Apache-2.0
"""Metrics of store calls: latency, errors, and the lag of the watch."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate

from agent.telemetry.exposition import family, number

BUCKETS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Buckets of a call's duration: an attempt has 1 s, up to 1.8 s on a slow line; a call 2 s."""

CALLS = "muster_store_call_seconds"

UNSEEN_MAX = 64


class StoreMetrics:
    """The metrics of store calls.

    Labels are the calls of ``rdzv.store.Store`` and the errors that they raise: a few of each.
    ``clock`` is monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._unseen: deque[tuple[int, float]] = deque()
        self._shown = 0
        self._calls: dict[str, list[int]] = {}
        self._took_s: dict[str, float] = {}
        self._errors: dict[str, int] = {}

    def called(self, call: str, seconds: float) -> None:
        """Record a call and its duration."""
        counts = self._calls.setdefault(call, [0] * (len(BUCKETS_S) + 1))
        counts[bisect_left(BUCKETS_S, seconds)] += 1
        self._took_s[call] = self._took_s.get(call, 0.0) + seconds

    def failed(self, kind: str) -> None:
        """Count an error."""
        self._errors[kind] = self._errors.get(kind, 0) + 1

    def text(self) -> str:
        """Render the calls and the errors in Prometheus' text format."""
        errors = "muster_store_errors_total"
        return family(
            CALLS,
            "histogram",
            "How long calls to the store took, by call; those that failed, too.",
            self._histogram(),
        ) + family(
            errors,
            "counter",
            "Calls to the store that failed, by kind.",
            [(errors, {"kind": kind}, count) for kind, count in self._errors.items()],
        )

    def _histogram(self) -> Iterator[tuple[str, dict[str, str], float]]:
        for call, counts in self._calls.items():
            sums = list(accumulate(counts))
            for bound, count in zip((*BUCKETS_S, math.inf), sums, strict=True):
                yield f"{CALLS}_bucket", {"call": call, "le": number(bound)}, count
            yield f"{CALLS}_count", {"call": call}, sums[-1]
            yield f"{CALLS}_sum", {"call": call}, self._took_s[call]

    def answered(self, revision: int) -> None:
        """Note a revision that came in a response."""
        newest = self._unseen[-1][0] if self._unseen else 0
        if revision > newest and len(self._unseen) < UNSEEN_MAX:
            self._unseen.append((revision, self._clock()))

    def unseen_for_s(self, shown: int) -> float:
        """Return the seconds since a response had a revision after ``shown``; 0 if none had."""
        if shown < self._shown:
            self._unseen.clear()  # the store was restored, and its revisions start again
        self._shown = shown
        while self._unseen and self._unseen[0][0] <= shown:
            self._unseen.popleft()
        return self._clock() - self._unseen[0][1] if self._unseen else 0.0
