# SPDX-License-Identifier: Apache-2.0
"""The reconciler of jobs with their owners, on the memory store, in virtual time."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from controller.jobs.jobs import Jobs
from controller.owners.reconciler import LOOKED_AT_S, OwnerReconciler
from rdzv.keys import JobKeys
from rdzv.records.job import Job
from rdzv.store import Delete, Put
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.clocks.virtual import now
from tests.support.records import member

pytestmark = pytest.mark.virtual

KEYS = JobKeys("team", "digits")
MEMBER = KEYS.in_generation(1).member("a")


class NoOwners:
    """Pods that nothing in the cluster has made, counted by the reads of their owner."""

    def __init__(self) -> None:
        self.reads = 0

    async def of(self, job: object) -> None:
        self.reads += 1


async def test_a_job_that_is_deleted_with_its_members_is_not_due_for_ever() -> None:
    """Both go in one change where a whole job is deleted from the store."""
    store = MemoryStore(MemoryEngine(now))
    owners: Any = NoOwners()
    async with Jobs(store, now, Random(1)).following() as jobs:
        api: Any = None
        reconciler = OwnerReconciler(api, jobs, owners, now, scales=True, annotates=False)
        running = asyncio.create_task(reconciler.run())
        records = [Put(KEYS.job, Job(1, 4).to_json()), Put(MEMBER, member("a").to_json())]
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
