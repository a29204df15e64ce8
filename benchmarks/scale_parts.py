# SPDX-License-Identifier: Apache-2.0
"""A helper process of ``scale``: many sidecars' registrars and watchers, each with its own store.

The other work of a sidecar with the membership is represented by one listing, computed anew at each
snapshot.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from random import Random
from time import monotonic
from typing import Any

from agent.parts import job_client, member_parts
from agent.surroundings import MemberSettings
from benchmarks.resident_memory import rss_mib
from benchmarks.sidecar_parts import identity, surroundings
from benchmarks.worker import serve
from rdzv.errors import StoreAmbiguous
from rdzv.keys import JobKeys
from rdzv.snapshot import Snapshot, listing_of
from rdzv.store import RangeResult, TxnResult, WatchBatch
from rdzv.store.etcd.client import EtcdStore

LEAVE_S = 60.0
"""Longer than a preStop hook has: a whole third leaves on a few processors."""


class CountedStore(EtcdStore):
    """A store that counts the calls of one sidecar and their results.

    ``settled``: the number of its own writes that were applied, or may have been.
    """

    counts: Counter[str]
    settled = 0

    async def range(self, *args: Any, **options: Any) -> RangeResult:
        result = await super().range(*args, **options)
        self.counts["reads"] += 1
        self.counts["records read"] += len(result.kvs)
        return result

    async def txn(self, *args: Any, **options: Any) -> TxnResult:
        try:
            result = await super().txn(*args, **options)
        except StoreAmbiguous:
            self.counts["writes in doubt"] += 1
            self.settled += 1
            raise
        self.counts["writes" if result.succeeded else "writes that lost"] += 1
        self.settled += result.succeeded
        return result

    async def lease_keep_alive(self, *args: Any, **options: Any) -> float:
        self.counts["renewals"] += 1
        return await super().lease_keep_alive(*args, **options)

    async def watch(self, *args: Any, **options: Any) -> AsyncGenerator[WatchBatch, None]:
        async for batch in super().watch(*args, **options):
            if batch.events:
                self.counts["batches"] += 1
                self.counts["events"] += len(batch.events)
            yield batch


class Member:
    """One sidecar's registrar and watcher."""

    def __init__(
        self, endpoint: str, keys: JobKeys, name: str, lease_ttl_s: float, counts: Counter[str]
    ) -> None:
        self._store = CountedStore([endpoint])
        self._store.counts = self._counts = counts
        settings = MemberSettings(
            keys=keys, identity=identity(name, 1, 100_000), lease_ttl_s=lease_ttl_s
        )
        around = surroundings(self._store, Random(name))
        self._client = job_client(around, keys)
        self._membership = self._client.membership
        self._registrar = member_parts(around, settings, self._client).registrar
        self.listed = 0
        self.listed_s = 0.0
        self._last_listed: Snapshot | None = None
        self._on_list = asyncio.Event()
        self._running = asyncio.create_task(self._run(), name=name)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._client.watching.run())
            tasks.create_task(self._list())
            self._registering = tasks.create_task(self._registrar.run())

    async def _list(self) -> None:
        while True:
            snapshot = self._membership.snapshot()
            listed = len(listing_of(snapshot).listed)
            self._counts["lists made"] += 1
            if listed != self.listed:
                self.listed, self.listed_s = listed, monotonic()
            self._last_listed = snapshot
            self._on_list.set()
            await self._membership.changed_from(snapshot)

    async def registered(self) -> None:
        """Wait until it is registered, and its own watch shows it."""
        await self._registrar.registered.wait()

    async def until(self, listed: int) -> float:
        """Wait until ``listed`` members are listed, and no list is still due; return since when.

        Wake-ups are debounced: the list for the last events of a storm is made up to seconds later.
        """
        while self.listed != listed or self._membership.snapshot() is not self._last_listed:
            if self._running.done():
                self._running.result()
            self._on_list.clear()
            await self._on_list.wait()
        return self.listed_s

    async def leave(self) -> None:
        """Leave in good order, and stop."""
        self._registering.cancel()
        await asyncio.wait({self._registering})
        settled = self._store.settled
        await self._registrar.leave(LEAVE_S)
        if self._store.settled == settled:
            # The expiry of its lease removed the record instead, or a call that was given up did.
            self._counts["writes in doubt"] += 1
        await self.stop()

    async def stop(self) -> None:
        self._running.cancel()
        await asyncio.wait({self._running})
        await self._store.close()


class Members:
    """All sidecars of this process."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._counts: Counter[str] = Counter()

    async def obey(self, order: dict[str, Any]) -> Any:
        match order.pop("do"):
            case "join":
                return await self._join(**order)
            case "leave":
                return await self._leave(**order)
            case "until":
                return await self._until(**order)
            case "counts":
                return self._report()
        raise ValueError(f"no such order: {order}")

    async def _join(
        self, endpoint: str, job: str, lease_ttl_s: float, names: Sequence[str], at_once: int
    ) -> None:
        """Start sidecars in waves of ``at_once``; the next one once the former is registered."""
        keys = JobKeys("bench", job)
        for first in range(0, len(names), at_once):
            wave = names[first : first + at_once]
            for name in wave:
                self._members[name] = Member(endpoint, keys, name, lease_ttl_s, self._counts)
            await asyncio.gather(*(self._members[name].registered() for name in wave))

    async def _leave(self, names: Sequence[str]) -> None:
        leaving = [self._members.pop(name) for name in names]
        await asyncio.gather(*(member.leave() for member in leaving))

    async def _until(self, listed: int) -> list[float]:
        return await asyncio.gather(*(member.until(listed) for member in self._members.values()))

    def _report(self) -> dict[str, Any]:
        return {
            **self._counts,
            "cpu_s": time.process_time(),
            "rss_mib": rss_mib(os.getpid()),
            "sidecars": len(self._members),
        }

    async def stop(self) -> None:
        await asyncio.gather(*(member.stop() for member in self._members.values()))


async def main() -> None:
    members = Members()
    await serve(members.obey)
    await members.stop()


if __name__ == "__main__":
    asyncio.run(main())
