# SPDX-License-Identifier: Apache-2.0
"""What writes quarantine records: no death is forgotten, whatever the store does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from random import Random

import pytest

from launcher_shim.c10d.quarantining import Quarantining
from launcher_shim.rundir.rank_reports import StepLine
from rdzv.job import JobClient
from rdzv.reconcile import Kernel
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.records.quarantine import FormedWorld, Stay, Terms
from rdzv.store import Compare, Put
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.clocks.virtual import DISK_S, now
from tests.support.records import member
from tests.support.sidecars.jobs import KEYS, identity
from tests.support.tasks import beside

pytestmark = pytest.mark.virtual

HERE = KEYS.in_generation(1)
LEASE = 7


def here(members: str = "a", revision: int = 0) -> FormedWorld:
    """A world that a torchrun is in from now on."""
    return FormedWorld(frozenset(members), revision, now())


STAY = Stay("nonce", FormedWorld(frozenset("a"), 0), 1.0)


class Pod:
    """A member, whose watch runs once ``follow`` is set, and what writes the records there."""

    def __init__(self) -> None:
        self.store = MemoryStore(MemoryEngine(now))
        self._client = JobClient.of(self.store, KEYS, clock=now)
        self.mirror, self.membership = self._client.mirror, self._client.membership
        self.follow = asyncio.Event()
        self.lease: int | None = LEASE
        self.refused = asyncio.Event()
        self.again = asyncio.Event()
        kernel = Kernel(self._client, self._fence, self.again.wait, now, Random(1))
        self.keeping = Quarantining(kernel, identity("a"), terms=Terms(), steps=lambda: self.told)
        self.told: list[StepLine] = []
        """How far the ranks of its pod are."""

    def _fence(self) -> Sequence[Compare] | None:
        if self.lease is None:
            self.refused.set()
            return None
        return [Compare(HERE.member("a"), "lease", "=", self.lease)]

    async def seed(self) -> None:
        """Write the job and the member into the store."""
        await self.store.lease_grant(LEASE, 600)
        job = Put(KEYS.job, Job(JobPolicy(1, 2)).to_json())
        await self.store.txn([], [job, Put(HERE.member("a"), member("a").to_json(), LEASE)])

    async def watch(self) -> None:
        await self.follow.wait()
        await self._client.watching.run()

    async def counts(self, deaths: int) -> None:
        """Wait until the store has so many."""
        while True:
            snapshot = self.membership.snapshot()
            known = snapshot.quarantines.get("a")
            if (0 if known is None else known.deaths) == deaths:
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


async def test_a_death_is_counted_once_the_member_is_registered_although_nothing_else_moves() -> (
    None
):
    async with pod() as one:
        one.follow.set()
        one.lease = None
        one.keeping.died(STAY)
        await one.refused.wait()
        # The store has long shown the registration: that it is in force is no change there.
        one.lease = LEASE
        one.again.set()
        await one.counts(1)


async def test_a_death_is_counted_in_a_store_that_was_restored_to_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rdzv.mirror.SEE_S", 0.2)
    async with pod() as one:
        written = one.store.watch(HERE.quarantines, one.store.engine.revision + 1)
        one.keeping.died(STAY)
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
            # In a world: as something is held against it, its steps are looked at.
            one.keeping.came(f"torchrun {deaths}")
            one.keeping.entered(f"torchrun {deaths}", here())
            await asyncio.sleep(DISK_S * 0.9)
            one.keeping.died(replace(STAY, nonce=f"torchrun {deaths}", world=here()))
            # The third one in a row clears all, as nobody is left who could be left out.
            await one.counts(deaths % 3)


async def test_steps_of_the_world_before_are_no_progress_of_this_one() -> None:
    async with pod() as one:
        one.follow.set()
        one.keeping.died(STAY)
        await one.counts(1)
        for world in range(3):
            one.keeping.came("torchrun")
            one.keeping.entered("torchrun", here())
            one.told = [StepLine((1, 0), 1, 150 * (world + 1))]
            await asyncio.sleep(20)
        one.keeping.died(replace(STAY, nonce="torchrun", world=here()))
        await one.counts(2)
