# SPDX-License-Identifier: Apache-2.0
"""The store in one process: the semantics, for tests, simulations and the embedded server.

Each ``MemoryStore`` is one client; clients that share a ``MemoryEngine`` share the data. A
simulation injects ``Faults``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rdzv.errors import Compacted, LeaseLost, StoreAmbiguous, StoreUnavailable
from rdzv.store.interface import (
    DEFAULT_TIMEOUT_S,
    WATCH_PROGRESS_S,
    Compare,
    Delete,
    Interval,
    KeyValue,
    Operation,
    Page,
    Put,
    RangeResult,
    Rest,
    StoreStatus,
    TxnResult,
    WatchBatch,
    key_bytes,
)
from rdzv.store.memory.actions import Action, Condition, Erase, Read, Reply, Write
from rdzv.store.memory.engine import VERSION, MemoryEngine, Watcher

_MIN_WAIT_S = 0.02
"""Shortest wait, in seconds: a clock that a test holds still, just before a lease ends, must not
spin the loop."""


class Faults:
    """Hooks around everything a ``MemoryStore`` does; these let all pass.

    ``call`` is the method's name. A hook that waits beyond the call's deadline ends it as the real
    driver would: ``StoreUnavailable`` before a write or at a read, ``StoreAmbiguous`` after.
    """

    async def before(self, call: str) -> None:
        """Run before the store acts; raise ``StoreUnavailable`` to refuse the call."""

    async def after(self, call: str) -> None:
        """Run when the store has acted; raise ``StoreAmbiguous`` to lose the answer."""

    async def delivering(self) -> None:
        """Run before a watch takes its next batch; wait here to hold the batch back."""


__all__ = ["MemoryEngine", "MemoryStore"]


class MemoryStore:
    """A ``Store`` on a ``MemoryEngine``; without one it has its own."""

    def __init__(self, engine: MemoryEngine | None = None, *, faults: Faults | None = None) -> None:
        self.engine = MemoryEngine() if engine is None else engine
        self.faults = Faults() if faults is None else faults
        self._wakes: set[asyncio.Event] = set()
        self._closed = False

    async def range(
        self, key: str, *, prefix: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> RangeResult:
        """Read one key, or all with a prefix, linearizably."""
        async with self._call("range", timeout_s, write=False):
            kvs = self.engine.read(Interval.of(key, prefix=prefix))
            result = RangeResult(self.engine.revision, kvs)
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
        """Read the first ``limit`` keys under ``prefix`` that come after the key ``after``."""
        async with self._call("range", timeout_s, write=False):
            kvs = self.engine.read(Interval.after(after, prefix), revision)
            page = Page(revision or self.engine.revision, kvs[:limit], len(kvs) > limit)
        return page

    async def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> TxnResult:
        """Apply ``then`` if every compare holds, else ``otherwise``; atomically."""
        async with self._call("txn", timeout_s, write=True):
            result = transact(self.engine, compares, then, otherwise)
        return result

    async def watch(
        self, prefix: str, start_revision: int, *, rest: Rest | None = None
    ) -> AsyncGenerator[WatchBatch, None]:
        """Follow every key under ``prefix`` from ``start_revision`` on (inclusive)."""
        engine = self.engine
        if start_revision < 1:
            raise ValueError(f"a watch starts at revision 1 or later, got {start_revision}")
        if start_revision > engine.revision + 1:
            raise Compacted(
                f"revision {start_revision} was never reached here: now is {engine.revision}",
                engine.compact_revision,
            )
        wake = asyncio.Event()
        self._wakes.add(wake)
        watcher = engine.watch(Interval.of(prefix, prefix=True), start_revision, wake.set)
        try:
            while not self._closed:
                batch = await self._next_batch(watcher, wake)
                if not self._closed:
                    yield batch
        finally:
            self._wakes.discard(wake)
            watcher.close()

    async def lease_grant(
        self, lease_id: int, ttl_s: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Grant the lease ``lease_id``; one that exists counts as success."""
        if lease_id <= 0:
            raise ValueError(f"a lease id is a positive number, got {lease_id}")
        async with self._call("lease_grant", timeout_s, write=True):
            self.engine.grant(lease_id, ttl_s)

    async def lease_keep_alive(
        self, lease_id: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> float:
        """Renew the lease; return its time to live in seconds, or raise ``LeaseLost``."""
        async with self._call("lease_keep_alive", timeout_s, write=True):
            ttl_s = self.engine.keep_alive(lease_id)
        return ttl_s

    async def lease_revoke(self, lease_id: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Revoke the lease and delete its keys; a lease that is gone counts as success."""
        async with self._call("lease_revoke", timeout_s, write=True):
            try:
                self.engine.revoke(lease_id)
            except LeaseLost:
                return

    async def compact(self, revision: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Compact the history before ``revision``; one already compacted counts as success."""
        async with self._call("compact", timeout_s, write=True):
            try:
                self.engine.compact(revision)
            except Compacted:
                return

    async def status(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> StoreStatus:
        """Read the status of the engine."""
        async with self._call("status", timeout_s, write=False):
            engine = self.engine
            size, in_use = engine.size_bytes
            result = StoreStatus(
                *("memory", VERSION, engine.cluster_id, 1, 1, engine.revision, size, in_use),
                errors=engine.alarms,
            )
        return result

    async def close(self) -> None:
        """End the watches; every later call raises ``StoreUnavailable``."""
        self._closed = True
        for wake in self._wakes:
            wake.set()

    @asynccontextmanager
    async def _call(self, call: str, timeout_s: float, *, write: bool) -> AsyncIterator[None]:
        acted = False
        try:
            async with asyncio.timeout(timeout_s):
                # A real store never answers within the same turn of the loop.
                await asyncio.sleep(0)
                await self.faults.before(call)
                if self._closed:
                    raise StoreUnavailable(f"{call}: this store client is closed")
                acted = True
                yield
                await self.faults.after(call)
        except TimeoutError:
            if acted and write:
                raise StoreAmbiguous(f"{call}: no answer within {timeout_s} s") from None
            raise StoreUnavailable(f"{call}: no answer within {timeout_s} s") from None
        except StoreAmbiguous as error:
            if write:
                raise
            raise StoreUnavailable(str(error)) from error

    async def _next_batch(self, watcher: Watcher, wake: asyncio.Event) -> WatchBatch:
        engine = self.engine
        loop = asyncio.get_running_loop()
        progress_at = loop.time() + WATCH_PROGRESS_S
        while True:
            await self.faults.delivering()
            wake.clear()
            revision, events = watcher.take()
            left_s = progress_at - loop.time()
            if events or left_s <= 0 or self._closed:
                return WatchBatch(revision, events)
            expiry_s = max(engine.leases.next_deadline_s() - engine.clock(), _MIN_WAIT_S)
            try:
                async with asyncio.timeout(min(left_s, expiry_s)):
                    await wake.wait()
            except TimeoutError:
                continue


def transact(
    engine: MemoryEngine,
    compares: Sequence[Compare],
    then: Sequence[Operation],
    otherwise: Sequence[Operation] = (),
) -> TxnResult:
    """Execute at once, on ``engine``, what ``Store.txn`` asks for."""
    succeeded, replies = engine.txn(
        [_condition(compare) for compare in compares],
        [_action(operation) for operation in then],
        [_action(operation) for operation in otherwise],
    )
    responses = tuple(map(_response, then if succeeded else otherwise, replies))
    return TxnResult(succeeded, engine.revision, responses)


def _condition(compare: Compare) -> Condition:
    interval = Interval.of(compare.key, prefix=compare.prefix)
    return Condition(interval, compare.target, compare.op, compare.operand)


def _action(operation: Operation) -> Action:
    if isinstance(operation, Put):
        return Write(key_bytes(operation.key), operation.value, operation.lease)
    interval = Interval.of(operation.key, prefix=operation.prefix)
    if isinstance(operation, Delete):
        return Erase(interval)
    return Read(interval, operation.revision)


def _response(operation: Operation, reply: Reply) -> tuple[KeyValue, ...] | int | None:
    if isinstance(operation, Put):
        return None
    return len(reply) if isinstance(operation, Delete) else reply
