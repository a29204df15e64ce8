# SPDX-License-Identifier: Apache-2.0
"""The reconciler of jobs with their owners, on the memory store, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from controller.jobs import Jobs
from controller.owner_reconciler import LOOKED_AT_S, OwnerReconciler
from controller.owners import FRESH_S, OwnerSeen
from rdzv.keys import JobKeys
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.store import Delete, Put
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.clocks.virtual import now
from tests.support.records import member

pytestmark = pytest.mark.virtual

KEYS = JobKeys("team", "digits")
MEMBER = KEYS.in_generation(1).member("a")


def of_today(name: str) -> bytes:
    """The record of a member whose sidecar knows what ``desired`` means."""
    return member(name, version="0.2.0").to_json()


class NoOwners:
    """Pods that nothing in the cluster has made, counted by the reads of their owner."""

    def __init__(self) -> None:
        self.reads = 0

    async def of(self, job: object, *, again: bool) -> None:
        self.reads += 1


class ScaledOwners:
    """One owner; a copy of it is used until it is to be read again."""

    def __init__(self, replicas: int, *, autoscaled: bool = False) -> None:
        self.now = OwnerSeen({}, 0.0, "/p", replicas, autoscaled=autoscaled)
        self._copy = self.now

    async def of(self, job: object, *, again: bool) -> OwnerSeen:
        if again or now() - self._copy.read_s >= FRESH_S:
            self._copy = replace(self.now, read_s=now())
        return self._copy

    def scale(self, replicas: int) -> None:
        self.now = replace(self.now, replicas=replicas)


@asynccontextmanager
async def reconciled(owners: ScaledOwners) -> AsyncIterator[Desired]:
    """A job with one member, and what becomes desired of it."""
    store = MemoryStore(MemoryEngine(now))
    job = Job(JobPolicy(1, 8, gather_s=60.0))
    await store.txn([], [Put(KEYS.job, job.to_json()), Put(MEMBER, of_today("a"))])
    async with Jobs(store, now, Random(1)).following() as jobs:
        given: Any = owners
        api: Any = None
        reconciler = OwnerReconciler(api, jobs, given, now, scales=True, annotates=False)
        running = asyncio.create_task(reconciler.run())
        await asyncio.sleep(5)
        yield Desired(store, jobs)
        running.cancel()
        await asyncio.wait((running,))


class Desired:
    """The number that is desired, and the members that come and go."""

    def __init__(self, store: MemoryStore, jobs: Jobs) -> None:
        self._store = store
        self._jobs = jobs

    @property
    def number(self) -> int | None:
        record = self._jobs.states()[KEYS].snapshot.job
        assert record is not None
        return record.desired

    async def comes(self, name: str) -> None:
        key = KEYS.in_generation(1).member(name)
        await self._store.txn([], [Put(key, of_today(name))])

    async def goes(self, name: str) -> None:
        await self._store.txn([], [Delete(KEYS.in_generation(1).member(name))])


async def test_replicas_are_desired_as_soon_as_their_pods_come() -> None:
    owners = ScaledOwners(1)
    async with reconciled(owners) as desired:
        assert desired.number == 1
        owners.scale(2)
        await asyncio.sleep(1)
        await desired.comes("b")
        await asyncio.sleep(3)
        assert desired.number == 2
        owners.scale(1)
        await desired.goes("b")
        await asyncio.sleep(3)
        assert desired.number == 1


async def test_an_autoscaler_that_flaps_forms_no_larger_world() -> None:
    owners = ScaledOwners(1, autoscaled=True)
    async with reconciled(owners) as desired:
        for _ in range(4):
            owners.scale(3)
            for name in ("b", "c"):
                await desired.comes(name)
            await asyncio.sleep(15)
            assert desired.number == 1
            owners.scale(1)
            for name in ("b", "c"):
                await desired.goes(name)
            await asyncio.sleep(15)
        owners.scale(3)
        await desired.comes("b")
        await asyncio.sleep(50)
        assert desired.number == 1
        await asyncio.sleep(15)
        assert desired.number == 3


async def test_a_job_that_is_deleted_with_its_members_is_not_due_for_ever() -> None:
    """Both go in one change where a whole job is deleted from the store."""
    store = MemoryStore(MemoryEngine(now))
    owners: Any = NoOwners()
    async with Jobs(store, now, Random(1)).following() as jobs:
        api: Any = None
        reconciler = OwnerReconciler(api, jobs, owners, now, scales=True, annotates=False)
        running = asyncio.create_task(reconciler.run())
        records = [
            Put(KEYS.job, Job(JobPolicy(1, 4)).to_json()),
            Put(MEMBER, member("a").to_json()),
        ]
        await store.txn([], records)
        await asyncio.sleep(2)
        assert owners.reads == 1
        await store.txn([], [Delete(KEYS.job), Delete(MEMBER)])
        # The loop ends a test whose tasks go on and on while no time passes.
        await asyncio.sleep(2 * LOOKED_AT_S)
        assert owners.reads == 1
        assert not running.done()
        running.cancel()
        await asyncio.wait((running,))
