# SPDX-License-Identifier: Apache-2.0
"""Sidecars' parts on one engine of the memory store: each with its own mirror and faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from random import Random
from time import monotonic

from rdzv.errors import StoreAmbiguous, StoreFull, StoreUnavailable
from rdzv.keys import JobKeys
from rdzv.membership import Membership
from rdzv.model import Job
from rdzv.store import Compare, Delete, Put, Store
from rdzv.store.faults import Faults
from rdzv.store.memory import MemoryEngine, MemoryStore
from rdzv.watching import Mirror, Watching

KEYS = JobKeys("team", "digits")


class Unreliable(Faults):
    """Loses requests and answers by chance; a seed makes it the same each time."""

    def __init__(self, seed: int, share: float) -> None:
        self._random = Random(seed)
        self._share = share

    async def before(self, call: str) -> None:
        if self._random.random() < self._share:
            raise StoreUnavailable(f"{call}: lost on the way there")

    async def after(self, call: str) -> None:
        if call == "txn" and self._random.random() < self._share:
            raise StoreAmbiguous(f"{call}: lost on the way back")


class NoRoom(Faults):
    """Refuses some transactions, which may have been ``applied`` all the same."""

    def __init__(self, *, applied: bool, times: int) -> None:
        self.applied = applied
        self.times = times

    async def before(self, call: str) -> None:
        self._refuse(call, now=not self.applied)

    async def after(self, call: str) -> None:
        self._refuse(call, now=self.applied)

    def _refuse(self, call: str, *, now: bool) -> None:
        if call == "txn" and now and self.times:
            self.times -= 1
            raise StoreFull("etcdserver: mvcc: database space exceeded")


async def begin_next_life(store: Store, keys: JobKeys, seen: Job) -> None:
    """Do as a sidecar does that finds nobody of the life that was ``seen``."""
    job = replace(seen, generation=seen.generation + 1)
    old = keys.in_generation(seen.generation)
    result = await store.txn(
        [Compare(keys.job, "mod", "=", seen.mod_revision)],
        [Put(keys.job, job.to_json()), Delete(old.prefix, prefix=True)],
    )
    assert result.succeeded


@dataclass
class Client:
    """One sidecar's view of the store."""

    store: MemoryStore
    mirror: Mirror
    membership: Membership


@asynccontextmanager
async def client(engine: MemoryEngine, faults: Faults | None = None) -> AsyncIterator[Client]:
    """A client whose mirror has been loaded and follows the engine."""
    store = MemoryStore(engine, faults=faults)
    mirror = Mirror(KEYS.prefix, monotonic)
    watching = asyncio.create_task(Watching(MemoryStore(engine), mirror).run())
    try:
        async with asyncio.timeout(30):
            await mirror.changed_after(0)
        yield Client(store, mirror, Membership(KEYS, mirror))
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await store.close()
