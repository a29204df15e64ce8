# SPDX-License-Identifier: Apache-2.0
"""Pods that no node has room for, counted into the job's record: no world waits for them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from uuid import uuid4

import pytest

from controller.cluster import paths
from controller.cluster.api import ClusterApi
from controller.cluster.collection import Collection
from controller.jobs import Jobs
from controller.owner_reconciler import UnplacedWriter
from controller.owners import pod_seen
from injection.settings import LABEL
from rdzv.keys import JobKeys
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.store import Put, Store
from tests.support.cluster_api import FakeApi
from tests.support.records import member
from tests.support.tasks import beside

pytestmark = pytest.mark.usefixtures("empty_store")

PATIENCE_S = 150.0
NO_ROOM = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}


async def test_a_job_waits_for_no_pod_without_a_node(tmp_path: Path, store: Store) -> None:
    keys = JobKeys("team", f"digits-{uuid4().hex}")
    wanted = Job(JobPolicy(1, 4), desired=4)
    await store.txn(
        [],
        [
            Put(keys.job, wanted.to_json()),
            Put(keys.in_generation(1).member("a"), member("a", 1).to_json()),
        ],
    )

    async def until(unplaced: int) -> Job:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                job = Job.from_kv((await store.range(keys.job)).kvs[0])
                if job.unplaced == unplaced:
                    return job
                await asyncio.sleep(0.05)

    async with (
        FakeApi(tmp_path) as fake,
        ClusterApi(fake.access) as api,
        Jobs(store, time.monotonic, Random(1)).following() as jobs,
        Collection(api, paths.PODS_OF_JOBS, pod_seen).following() as pods,
    ):

        async def put(name: str, job: str, *conditions: object) -> None:
            labels = {LABEL: job}
            metadata = {"namespace": "team", "uid": f"uid-{name}", "labels": labels}
            shown = {"metadata": metadata, "spec": {}, "status": {"conditions": [*conditions]}}
            await fake.put(f"/api/v1/namespaces/team/pods/{name}", shown)

        await put("a", keys.job_name)
        await put("b", keys.job_name, NO_ROOM)
        await put("c", keys.job_name, NO_ROOM)
        await put("x", "other", NO_ROOM)
        async with beside(UnplacedWriter(jobs, pods).run()):
            assert replace(await until(2), mod_revision=0) == replace(wanted, unplaced=2)
            await put("c", keys.job_name)
            assert (await until(1)).expected == 3
            await put("b", keys.job_name)
            assert (await until(0)).expected == 4


def test_a_world_of_those_that_have_a_node_waits_for_nobody() -> None:
    assert Job(JobPolicy(1, 4)).expected is None
    assert Job(JobPolicy(1, 4), desired=4, unplaced=2).expected == 2
    assert b"unplaced" not in Job(JobPolicy(1, 4), desired=4).to_json()
