# SPDX-License-Identifier: Apache-2.0
"""What keeps a member's quarantine record: no death is forgotten, whatever the store does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from launcher_shim.c10d import quarantining
from launcher_shim.c10d.quarantining import Quarantining
from rdzv.job import JobClient
from rdzv.keys import JobKeys
from rdzv.members.guard import Registered
from rdzv.records.job import Job, Member
from rdzv.records.quarantine import Terms
from rdzv.store import Put
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.clocks.virtual import DISK_S, now
from tests.support.sidecars.jobs import identity
from tests.support.tasks import beside

pytestmark = pytest.mark.virtual

KEYS = JobKeys("team", "digits")
HERE = KEYS.in_generation(1)
LEASE = 7


class Pod:
    """One member, whose watch runs once ``follow`` is set, and what keeps its record."""

    def __init__(self) -> None:
        self.store = MemoryStore(MemoryEngine(now))
        self._client = JobClient.of(self.store, KEYS, clock=now)
        self.mirror, self.membership = self._client.mirror, self._client.membership
        self.follow = asyncio.Event()
        self.lease: int | None = LEASE
        self.refused = asyncio.Event()
        self.keeping = Quarantining(
            self._client,
            identity("a"),
            registered=lambda: Registered(HERE.member("a"), self._lease, asyncio.Event().wait),
            clock=now,
            terms=Terms(),
        )

    def _lease(self) -> int | None:
        if self.lease is None:
            self.refused.set()
        return self.lease

    async def seed(self) -> None:
        """Write the job and the member into the store."""
        member = Member("a", "uid-a", 1, "10.0.0.1", "host", "worker", 1, 1, 2)
        await self.store.lease_grant(LEASE, 600)
        job = Put(KEYS.job, Job(1, 2).to_json())
        await self.store.txn([], [job, Put(HERE.member("a"), member.to_json(), LEASE)])

    async def watch(self) -> None:
        await self.follow.wait()
        await self._client.watching.run()

    async def counts(self, deaths: int) -> None:
        """Wait until the store has so many."""
        while True:
            snapshot = self.membership.snapshot()
            known = snapshot.quarantines.get("a")
            if known is not None and known.deaths == deaths:
                return
            await self.membership.changed_from(snapshot)


@asynccontextmanager
async def pod() -> AsyncIterator[Pod]:
    one = Pod()
    await one.seed()
    read = await one.store.range(KEYS.prefix, prefix=True)
    one.mirror.replace(read.kvs, read.revision)
    async with beside(one.keeping.run(), one.watch()):
        yield one


async def test_a_death_is_counted_once_the_member_is_registered_although_nothing_else_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quarantining, "RETRY_S", 0.05)
    async with pod() as one:
        one.follow.set()
        one.lease = None
        one.keeping.ended("nonce", "died")
        await one.refused.wait()
        # The store has long shown the registration: that it is in force is no change there.
        one.lease = LEASE
        await one.counts(1)


async def test_a_death_is_counted_in_a_store_that_was_restored_to_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quarantining, "RETRY_S", 0.05)
    monkeypatch.setattr(quarantining, "SEE_OWN_WRITE_S", 0.2)
    async with pod() as one:
        written = one.store.watch(HERE.quarantines, one.store.engine.revision + 1)
        one.keeping.ended("nonce", "died")
        async with aclosing(written):
            while not (await anext(written)).events:
                continue
        one.store.engine = MemoryEngine(now)
        await one.seed()
        one.follow.set()
        await one.counts(1)


async def test_a_death_counts_that_comes_while_the_steps_of_the_living_one_are_looked_at() -> None:
    async with pod() as one:
        one.follow.set()
        for deaths in range(1, 101):
            # In a world: a row of fruitless ones is why the steps of the next are looked at.
            one.keeping.came(f"torchrun {deaths}")
            await asyncio.sleep(DISK_S * 0.9)
            one.keeping.ended(f"torchrun {deaths}", "died", 1.0)
            await one.counts(deaths)
