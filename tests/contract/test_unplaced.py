# SPDX-License-Identifier: Apache-2.0
"""Pods that no node has room for, counted into the job's record: no world waits for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from controller.jobs import Jobs
from controller.owner_reconciler import UnplacedWriter
from controller.owners import PodSeen
from rdzv.keys import JobKeys
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.store import Put
from rdzv.store.memory.client import MemoryStore
from tests.support.clocks.virtual import now
from tests.support.records import member
from tests.support.shown import Shown
from tests.support.tasks import beside

KEYS = JobKeys("team", "digits")
WANTED = Job(JobPolicy(1, 4), desired=4)


def seen(name: str, *, unplaced: bool, namespace: str = "team", job: str = "digits") -> PodSeen:
    return PodSeen(f"uid-{name}", namespace, name, "", None, None, job=job, unplaced=unplaced)


@pytest.mark.virtual
async def test_a_job_waits_for_no_pod_without_a_node() -> None:
    store, pods = MemoryStore(), Shown()
    joined = Put(KEYS.in_generation(1).member("a"), member("a", 1).to_json())
    await store.txn([], [Put(KEYS.job, WANTED.to_json()), joined])
    given: Any = pods
    async with (
        Jobs(store, now, Random(1)).following() as jobs,
        beside(UnplacedWriter(jobs, given).run()),
    ):
        for waiting, expected in (("bc", 2), ("b", 3), ("", 4)):
            found = [seen(name, unplaced=name in waiting) for name in "abc"]
            others = [seen("x", unplaced=True, job="other")]
            others += [seen("y", unplaced=True, namespace="other")]
            await pods.show(**{one.uid: one for one in (*found, *others)})
            await asyncio.sleep(100)
            job = Job.from_kv((await store.range(KEYS.job)).kvs[0])
            assert replace(job, mod_revision=0) == replace(WANTED, unplaced=len(waiting))
            assert job.expected == expected


def test_a_world_of_those_that_have_a_node_waits_for_nobody() -> None:
    assert Job(JobPolicy(1, 4)).expected is None
    assert b"unplaced" not in WANTED.to_json()
