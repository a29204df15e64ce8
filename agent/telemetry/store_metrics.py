# SPDX-License-Identifier: Apache-2.0
"""Metrics of store calls: latency, errors, and the lag of the watch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram

BUCKETS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Buckets of a call's duration: an attempt has 1 s, up to 1.8 s on a slow line; a call 2 s."""

UNSEEN_MAX = 64


class StoreMetrics:
    """The metrics of store calls.

    Labels are the calls of ``rdzv.store.Store`` and the errors that they raise: a few of each.
    ``clock`` is monotonic, in seconds.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._unseen: deque[tuple[int, float]] = deque()
        self._shown = 0
        self._calls = Histogram(
            "muster_store_call_seconds",
            "How long calls to the store took, by call; those that failed, too.",
            ["call"],
            buckets=BUCKETS_S,
            registry=registry,
        )
        self._errors = Counter(
            "muster_store_errors",
            "Calls to the store that failed, by kind.",
            ["kind"],
            registry=registry,
        )

    def called(self, call: str, seconds: float) -> None:
        """Record a call and its duration."""
        self._calls.labels(call).observe(seconds)

    def failed(self, kind: str) -> None:
        """Count an error."""
        self._errors.labels(kind).inc()

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
