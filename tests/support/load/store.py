# SPDX-License-Identifier: Apache-2.0
"""What a job does to the store, while a test breaks it: writes, a watch, leases, swaps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from itertools import pairwise

from rdzv.errors import LeaseLost, StoreAmbiguous, StoreError, StoreUnavailable
from rdzv.store import Compare, Put, Store, WatchEvent
from tests.support.clocks.calm_time import calm_time

WRITE_EVERY_S = 0.1
RENEW_EVERY_S = 0.7
SWAP_EVERY_S = 0.2
UNTIL_S = 60.0
SETTLE_S = 120.0


class StoreLoad:
    """A writer, and a client under test with a watch, leases and a compare-and-swap loop.

    ``first`` does what is done once, before anything is broken.
    """

    def __init__(
        self,
        first: Store,
        writer: Store,
        client: Store,
        prefix: str,
        *,
        lease_ids: Sequence[int],
        ttl_s: int,
    ) -> None:
        self.prefix = prefix
        self.written: list[str] = []
        self.written_at_s: list[float] = []
        self.events: list[WatchEvent] = []
        self.events_at_s: list[float] = []
        self.heard_at_s: list[float] = []
        self.swapped_at_s: list[float] = []
        self.leases_lost: list[int] = []
        self.ambiguous = 0
        self.unavailable = 0
        self._first, self._writer, self._client = first, writer, client
        self._lease_ids, self._ttl_s = lease_ids, ttl_s
        self._news = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run until left; the watch first delivers all that was written."""
        for lease_id in self._lease_ids:
            await self._first.lease_grant(lease_id, self._ttl_s)
            key = f"{self.prefix}leased/{lease_id}"
            await self._first.txn([], [Put(key, b"", lease_id)])
        start = (await self._first.range(self.prefix)).revision + 1
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch(start))
            busy = [group.create_task(self._write()), group.create_task(self._swap())]
            busy += [group.create_task(self._renew(lease_id)) for lease_id in self._lease_ids]
            yield
            for task in busy:
                task.cancel()
            await self.until(lambda: {e.kv.key for e in self.events} >= set(self.written))
            watching.cancel()

    async def until(self, condition: Callable[[], bool], deadline_s: float = UNTIL_S) -> None:
        """Wait for something that the watch or the writer brings about."""
        async with asyncio.timeout(deadline_s):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def settle(self, writes: int = 10) -> None:
        """Wait until that many further writes have been made, and seen, without a hitch."""
        goal = len(self.written) + writes
        await self.until(lambda: len(self.written) >= goal and len(self.events) >= goal, SETTLE_S)

    async def outlast(self, fault_s: float) -> None:
        """Let a fault that leaves the store whole last; by its end the client has gone past it."""
        goal, swapped = len(self.written) + 5, len(self.swapped_at_s) + 3
        await calm_time(fault_s, self.written_at_s)
        assert len(self.events) >= goal, "the watch waits for the end of the fault"
        assert len(self.swapped_at_s) >= swapped, "writes wait for the end of the fault"
        assert not self.leases_lost

    def assert_exact(self) -> None:
        """No event was lost, doubled or out of order."""
        keys = [event.kv.key for event in self.events]
        assert sorted(set(keys)) == sorted(keys), "an event came twice"
        assert set(self.written) <= set(keys), "an event was lost"
        revisions = [event.kv.mod_revision for event in self.events]
        assert revisions == sorted(revisions), "events came out of order"

    async def _watch(self, start: int) -> None:
        async with aclosing(self._client.watch(f"{self.prefix}n/", start)) as batches:
            async for batch in batches:
                now = time.monotonic()
                self.heard_at_s.append(now)
                self.events += batch.events
                self.events_at_s += [now] * len(batch.events)
                self._news.set()

    async def _write(self) -> None:
        number = 0
        while True:
            key = f"{self.prefix}n/{number:08}"
            await self._insist(
                lambda key=key: self._writer.txn(  # type: ignore[misc]
                    [Compare(key, "create", "=", 0)], [Put(key, b"x")]
                )
            )
            self.written.append(key)
            self.written_at_s.append(time.monotonic())
            self._news.set()
            number += 1
            await asyncio.sleep(WRITE_EVERY_S)

    async def _swap(self) -> None:
        key = f"{self.prefix}swap"
        while True:
            with suppress(StoreError):
                kvs = (await self._client.range(key)).kvs
                revision = kvs[0].mod_revision if kvs else 0
                await self._client.txn([Compare(key, "mod", "=", revision)], [Put(key, b"")])
                self.swapped_at_s.append(time.monotonic())
            await asyncio.sleep(SWAP_EVERY_S)

    async def _renew(self, lease_id: int) -> None:
        while True:
            try:
                await self._client.lease_keep_alive(lease_id)
            except LeaseLost:
                self.leases_lost.append(lease_id)
                return
            except (StoreAmbiguous, StoreUnavailable):
                continue
            await asyncio.sleep(RENEW_EVERY_S)

    async def _insist(self, write: Callable[[], Awaitable[object]]) -> None:
        """Repeat an idempotent write until it is known to be in."""
        while True:
            try:
                await write()
                return
            except StoreAmbiguous:
                self.ambiguous += 1
            except StoreUnavailable:
                self.unavailable += 1
            await asyncio.sleep(0.02)


def gap_s(moments_s: Sequence[float]) -> float:
    """The longest time between two of them."""
    return max((late - early for early, late in pairwise(moments_s)), default=float("inf"))
