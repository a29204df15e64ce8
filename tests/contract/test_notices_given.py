# SPDX-License-Identifier: Apache-2.0
"""What nodes show, as drains in a store: asked for, taken back, and left to who asked as well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import pytest

from controller.cluster import paths
from controller.cluster.api import ClusterApi
from controller.cluster.collection import Collection
from controller.jobs import Jobs
from controller.notice_executor import NoticeExecutor
from controller.notices import NoticePolicy, node_seen
from controller.owners import PREEMPTED, pod_seen
from rdzv.drain.transactions import take_over
from rdzv.keys import JobKeys
from rdzv.membership import snapshot_of
from rdzv.mirror import read_all
from rdzv.records.drain import Drain
from rdzv.records.job import HistoryEntry, Incarnation, Job
from rdzv.records.policy import JobPolicy
from rdzv.snapshot import Snapshot
from rdzv.store import Put, Store
from tests.support.cluster_api import FakeApi
from tests.support.records import drain, member
from tests.support.tasks import beside

pytestmark = pytest.mark.usefixtures("empty_store")

NODE = "/api/v1/nodes/north"
PATIENCE_S = 150.0
SPOT = {"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}


class StoredJob:
    """One job of three pods on a node, in a store that tests share."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.keys = JobKeys("team", f"digits-{uuid4().hex}")

    async def begin(self, fake: FakeApi) -> None:
        live = self.keys.in_generation(1)
        labels = {"muster.dev/job": self.keys.job_name}
        puts = [Put(self.keys.job, Job(JobPolicy(1, 4)).to_json())]
        for number, name in enumerate("abc", 1):
            pod = {"metadata": {"namespace": "team", "uid": f"uid-{name}", "labels": labels}}
            spec = {"spec": {"nodeName": "north", "containers": []}}
            await fake.put(f"/api/v1/namespaces/team/pods/{name}", {**pod, **spec})
            one = replace(member(name, number), version="0.2.0")
            held = Incarnation(name, number, one.pod_uid)
            puts += [
                Put(live.member(name), one.to_json()),
                Put(self.keys.incarnation(name), held.to_json()),
            ]
        await self.store.txn([], puts)

    async def snapshot(self) -> Snapshot:
        read = await read_all(self.store, self.keys.prefix, timeout_s=PATIENCE_S)
        return snapshot_of(self.keys, read)

    async def until_drains(self, names: str) -> dict[str, Drain]:
        """Wait until these drain, and no others."""
        async with asyncio.timeout(PATIENCE_S):
            revision = 0
            while True:
                read = await read_all(self.store, self.keys.prefix, timeout_s=PATIENCE_S)
                found = {d.member: d for d in snapshot_of(self.keys, read).drains.values()}
                if {*found} == {*names}:
                    return found
                revision = max(revision, read.revision) + 1
                watch = self.store.watch(self.keys.prefix, revision)
                async for batch in watch:
                    revision = batch.revision
                    if batch.events:
                        break
                await watch.aclose()


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeApi]:
    async with FakeApi(tmp_path) as fake:
        await fake.put(NODE, {"spec": {}})
        yield fake


@asynccontextmanager
async def asking(fake: FakeApi, store: Store) -> AsyncIterator[None]:
    async with (
        ClusterApi(fake.access) as api,
        Jobs(store, time.monotonic, Random(1)).following() as jobs,
        Collection(api, paths.PODS_OF_JOBS, pod_seen).following() as pods,
        Collection(api, paths.NODES, node_seen).following() as nodes,
    ):
        policy = NoticePolicy(again_s=0.0)
        executor = NoticeExecutor(jobs, nodes, pods, policy, "controller-0", time.monotonic)
        async with beside(executor.run()):
            yield


async def show(fake: FakeApi, **spec: Any) -> None:
    await fake.put(NODE, {**fake.objects[NODE], "spec": spec})


async def test_a_sign_is_a_drain_and_its_end_takes_back_what_nobody_else_has_asked_for(
    fake: FakeApi, store: Store
) -> None:
    job = StoredJob(store)
    await job.begin(fake)
    live = job.keys.in_generation(1)
    async with asking(fake, store):
        # A cordon spares what the job cannot train without; a taint does not.
        await show(fake, unschedulable=True)
        found = await job.until_drains("ab")
        assert {(one.source, one.requested_by) for one in found.values()} == {
            ("controller", "controller-0")
        }
        assert found["a"].reason == "node north is cordoned"
        await show(fake, unschedulable=True, taints=[SPOT])
        assert "spot-itn" in (await job.until_drains("abc"))["c"].reason

        # A person asks for one as well, and another is being ended.
        snapshot = await job.snapshot()
        planned = take_over(job.keys, snapshot, replace(drain("a"), source="operator"))
        assert planned is not None
        assert (await store.txn(*planned)).succeeded
        ending = replace(snapshot.drains["uid-b"], ending=True)
        await store.txn([], [Put(live.drain("uid-b"), ending.to_json())])
        before = (await job.snapshot()).incarnations["c"].mod_revision
        await show(fake)
        await job.until_drains("ab")
        after = await job.snapshot()
        assert after.incarnations["c"].mod_revision > before
        read = await store.range(job.keys.history, prefix=True)
        (entry,) = [HistoryEntry.from_kv(kv) for kv in read.kvs]
        assert (entry.member, entry.details) == ("c", {"outcome": "cancelled"})

        # The sign again is a drain again.
        await show(fake, taints=[SPOT])
        await job.until_drains("abc")


async def test_a_sign_that_came_and_one_that_went_while_nobody_looked_count_at_the_start(
    fake: FakeApi, store: Store
) -> None:
    job = StoredJob(store)
    await job.begin(fake)
    await show(fake, taints=[SPOT])
    async with asking(fake, store):
        found = await job.until_drains("abc")
        # Sidecars that see one without the others save twice.
        assert len({one.mod_revision for one in found.values()}) == 1
    await show(fake)
    async with asking(fake, store):
        await job.until_drains("")


async def test_a_preemption_is_noted_in_the_drain_of_a_pod_that_is_being_ended(
    fake: FakeApi, store: Store
) -> None:
    job = StoredJob(store)
    await job.begin(fake)
    key = job.keys.in_generation(1).drain("uid-a")
    ended = replace(drain("a", source="prestop"), ending=True)
    await store.txn([], [Put(key, ended.to_json())])
    path = "/api/v1/namespaces/team/pods/a"
    condition = {"type": "DisruptionTarget", "status": "True", "reason": PREEMPTED}
    shown = fake.objects[path]
    deleted = {**shown["metadata"], "deletionTimestamp": "2026-11-28T05:00:00Z"}
    async with asking(fake, store):
        await fake.put(path, {**shown, "metadata": deleted, "status": {"conditions": [condition]}})
        async with asyncio.timeout(PATIENCE_S):
            async for batch in store.watch(key, 1):
                found = [Drain.from_kv(event.kv) for event in batch.events]
                if any(drain.preempted for drain in found):
                    break
    assert (found[-1].source, found[-1].ending) == ("prestop", True)
