# SPDX-License-Identifier: Apache-2.0
"""Sidecars' parts on one engine of the memory store: each with its own mirror and faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

from agent.surroundings import Surroundings
from rdzv.errors import StoreAmbiguous, StoreFull, StoreUnavailable
from rdzv.job import JobClient
from rdzv.keys import JobKeys
from rdzv.members.registration import Identity
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.store import Compare, Delete, Put, Store
from rdzv.store.memory.client import Faults, MemoryEngine, MemoryStore
from tests.support.clocks.virtual import now
from tests.support.waiting import DEADLINE_S

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


class LosesOne(Faults):
    """Loses the ``request`` or the ``answer`` of the next transaction, whichever it ``loses``."""

    def __init__(self, loses: str = "") -> None:
        super().__init__()
        self.loses = loses

    async def before(self, call: str) -> None:
        await super().before(call)
        self._lose(call, "request")

    async def after(self, call: str) -> None:
        await super().after(call)
        self._lose(call, "answer")

    def _lose(self, call: str, what: str) -> None:
        if call == "txn" and self.loses == what:
            self.loses = ""
            raise StoreAmbiguous(f"the {what} is lost")


class SlowAnswers(Faults):
    """Each answer takes a while."""

    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s

    async def after(self, call: str) -> None:
        await asyncio.sleep(self._takes_s)


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


@asynccontextmanager
async def client(engine: MemoryEngine, faults: Faults | None = None) -> AsyncIterator[JobClient]:
    """A client whose mirror has been loaded and follows the engine, whatever ``faults`` do."""
    store = MemoryStore(engine, faults=faults)
    followed = JobClient.of(MemoryStore(engine), KEYS, clock=now)
    try:
        async with loaded(followed):
            yield replace(followed, store=store)
    finally:
        await store.close()


@asynccontextmanager
async def loaded(one: JobClient) -> AsyncIterator[JobClient]:
    """Let it follow its store, and wait until it has read it once."""
    async with one.following():
        async with asyncio.timeout(DEADLINE_S):
            await one.mirror.changed_after(0)
        yield one


def past_faults(one: JobClient) -> MemoryStore:
    """Another client of the same store, which no fault meets."""
    assert isinstance(one.store, MemoryStore)
    return MemoryStore(one.store.engine)


def surroundings(store: Store, seed: str) -> Surroundings:
    """What a sidecar's parts stand on in a test: the clock is that of the running loop."""
    clock = asyncio.get_running_loop().time
    return Surroundings(store=store, clock=clock, boot_clock=clock, random=Random(seed))


def identity(name: str, uid: str = "", *, least: int = 1, most: int = 4) -> Identity:
    """A worker of one slot."""
    return Identity(
        name,
        uid or f"uid-{name}",
        "127.0.0.1",
        "host",
        "worker",
        1,
        JobPolicy(least, most),
    )
