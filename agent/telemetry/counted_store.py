# SPDX-License-Identifier: Apache-2.0
"""A store client that times its calls and counts their failures."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from time import monotonic

from agent.telemetry.store_metrics import StoreMetrics
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
