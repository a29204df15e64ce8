# SPDX-License-Identifier: Apache-2.0
"""The Prometheus metrics, in text format 0.0.4: read at each scrape, and of each call of the store.

Gauges are read from the live objects, at no cost in between. The store's client times its calls and
counts their failures; the watch has its lag. Source:
https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from itertools import accumulate
from time import monotonic

from rdzv.errors import StoreError
from rdzv.store import (
    DEFAULT_TIMEOUT_S,
    Compare,
    Operation,
    Page,
    RangeResult,
    Rest,
    Store,
    StoreStatus,
    TxnResult,
    WatchBatch,
)

BUCKETS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Buckets of a call's duration: an attempt has 1 s, up to 1.8 s on a slow line; a call 2 s."""

CALLS = "muster_store_call_seconds"

UNSEEN_MAX = 64

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def family(
    name: str, kind: str, help_text: str, samples: Iterable[tuple[str, Mapping[str, str], float]]
) -> str:
    """Render a family: ``kind`` is counter, gauge or histogram.

    A sample is its name, its labels and its value.
    """
    help_text = help_text.replace("\\", r"\\").replace("\n", r"\n")
    lines = [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
    lines += [f"{sample}{_labels(labels)} {number(value)}" for sample, labels, value in samples]
    return "\n".join([*lines, ""])


def number(value: float) -> str:
    """Spell a value as Prometheus reads it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{','.join(pairs)}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


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


Read = Callable[[], float | Mapping[str, float] | Mapping[tuple[str, ...], float]]
"""The value of a gauge; of one with labels, a value for each of theirs."""


class Metrics:
    """The metrics of one sidecar."""

    def __init__(self) -> None:
        self.store = StoreMetrics(monotonic)
        self._gauges: dict[str, Callable[[], str]] = {}

    def gauge(
        self,
        name: str,
        help_text: str,
        read: Read,
        *labels: str,
    ) -> None:
        """Add a gauge that is read at each scrape; ``read`` of a labelled one returns a dict."""

        def text() -> str:
            value = read()
            if not isinstance(value, Mapping):
                return family(name, "gauge", help_text, [(name, {}, value)])
            keyed = [((one,) if isinstance(one, str) else one, at) for one, at in value.items()]
            samples = [(name, dict(zip(labels, of, strict=True)), at) for of, at in sorted(keyed)]
            return family(name, "gauge", help_text, samples)

        if name in self._gauges:
            raise ValueError(f"there is a gauge {name} already")
        self._gauges[name] = text

    def text(self) -> bytes:
        """Render the metrics in Prometheus' text format."""
        gauges = (text() for text in self._gauges.values())
        return "".join((self.store.text(), *gauges)).encode()


class CountedStore:
    """A store client that passes every call on to ``store``, and reports it to ``metrics``."""

    def __init__(self, store: Store, metrics: StoreMetrics) -> None:
        self._store = store
        self._metrics = metrics

    async def range(
        self, key: str, *, prefix: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> RangeResult:
        """Read one key, or all with a prefix, linearizably."""
        with self._timed("range"):
            result = await self._store.range(key, prefix=prefix, timeout_s=timeout_s)
        self._metrics.answered(result.revision)
        return result

    async def page(
        self,
        prefix: str,
        *,
        limit: int,
        after: str = "",
        revision: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Page:
        """Read some of the keys under ``prefix``."""
        with self._timed("range"):
            page = await self._store.page(
                prefix, limit=limit, after=after, revision=revision, timeout_s=timeout_s
            )
        self._metrics.answered(page.revision)
        return page

    async def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> TxnResult:
        """Apply ``then`` if every compare holds, else ``otherwise``."""
        with self._timed("txn"):
            result = await self._store.txn(compares, then, otherwise, timeout_s=timeout_s)
        self._metrics.answered(result.revision)
        return result

    async def watch(
        self, prefix: str, start_revision: int, *, rest: Rest | None = None
    ) -> AsyncGenerator[WatchBatch, None]:
        """Follow every key under ``prefix``."""
        with self._counted():
            async with aclosing(self._store.watch(prefix, start_revision, rest=rest)) as batches:
                async for batch in batches:
                    yield batch

    async def lease_grant(
        self, lease_id: int, ttl_s: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Grant a lease."""
        with self._timed("lease_grant"):
            await self._store.lease_grant(lease_id, ttl_s, timeout_s=timeout_s)

    async def lease_keep_alive(
        self, lease_id: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> float:
        """Renew a lease once."""
        with self._timed("lease_keep_alive"):
            return await self._store.lease_keep_alive(lease_id, timeout_s=timeout_s)

    async def lease_revoke(self, lease_id: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Revoke a lease."""
        with self._timed("lease_revoke"):
            await self._store.lease_revoke(lease_id, timeout_s=timeout_s)

    async def compact(self, revision: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Compact the history up to ``revision``."""
        with self._timed("compact"):
            await self._store.compact(revision, timeout_s=timeout_s)

    async def status(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> StoreStatus:
        """Read the status of one endpoint."""
        with self._timed("status"):
            return await self._store.status(timeout_s=timeout_s)

    async def close(self) -> None:
        """Close every connection."""
        await self._store.close()

    @contextmanager
    def _timed(self, call: str) -> Iterator[None]:
        began_s = monotonic()
        try:
            with self._counted():
                yield
        finally:
            self._metrics.called(call, monotonic() - began_s)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            self._metrics.failed(type(error).__name__)
            raise
