# SPDX-License-Identifier: Apache-2.0
"""A record names a foreign pod; the reconciler of jobs with their owners."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from controller.cluster.events import Events
from controller.job_events import EventReporter
from controller.jobs import Jobs
from controller.notice_executor import NoticeExecutor
from controller.notices import NodeSeen, NoticePolicy
from controller.owner_reconciler import LOOKED_AT_S, OwnerReconciler
from controller.owners import FRESH_S, Owners, OwnerSeen, PodSeen, pod_of, pod_seen
from injection.kinds import job_label
from rdzv.keys import JobKeys
from rdzv.records.drain import Drain
from rdzv.records.job import HistoryEntry, Incarnation, Job
from rdzv.records.policy import JobPolicy
from rdzv.store import Delete, Put
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.clocks.virtual import now
from tests.support.records import member
from tests.support.shown import Shown
from tests.support.tasks import beside

pytestmark = pytest.mark.virtual

MINE = JobKeys("attacker", "mine")
UID = "victims-uid"
BY_JOB = "batch.kubernetes.io/job-name"
Call = tuple[str, str]


class Api:
    """The API server's answers to the leader, and what it was asked."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    async def get(self, path: str, timeout_s: float = 0.0) -> dict[str, Any]:
        self.calls.append(("GET", path))
        return {"metadata": {"name": "payroll", "uid": "owner"}, "spec": {"replicas": 7}}

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        about = body["involvedObject"]
        self.calls.append(("EVENT", f"{about['namespace']} {about['kind']}/{about['name']}"))
        return body

    async def merge(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(("PATCH", path))
        return body


def pod(namespace: str, name: str, job: str) -> dict[str, Any]:
    maker = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "payroll-6c", "uid": "rs"}
    labels = {"pod-template-hash": "6c", "muster.dev/job": job}
    owners = [{**maker, "controller": True}]
    metadata = {"uid": UID, "namespace": namespace, "name": name, "labels": labels}
    return {"metadata": {**metadata, "ownerReferences": owners}, "spec": {"nodeName": "north"}}


async def led(shown: dict[str, Any], names: str) -> tuple[list[Call], dict[str, Drain]]:
    """Let ``MINE`` claim a pod as its member ``names``; return the calls, and the pod's drains."""
    store, api = MemoryStore(MemoryEngine(now)), Api()
    pods: Any = Shown(**{UID: pod_seen(shown)})
    nodes: Any = Shown(north=NodeSeen("north", shutting_down=True))
    leading: Any = SimpleNamespace(told=None, progress=lambda: None)
    given: Any = api
    live = MINE.in_generation(1)
    claimed = replace(member(names, uid=UID, most=100), version="0.2.0")
    async with Jobs(store, now, Random(1)).following() as jobs:
        owners = Owners(given, pods, now)
        reporter = EventReporter(jobs, owners, Events(given, now), leading)
        reconciler = OwnerReconciler(given, jobs, owners, now, scales=True, annotates=True)
        executor = NoticeExecutor(jobs, nodes, pods, NoticePolicy(), "controller-0", now)
        async with beside(reporter.run()), beside(reconciler.run()), beside(executor.run()):
            await asyncio.sleep(1)
            puts = [
                Put(MINE.job, Job(JobPolicy(1, 100)).to_json()),
                Put(live.member(names), claimed.to_json()),
            ]
            held = Incarnation(names, 1, UID)
            await store.txn([], [*puts, Put(MINE.incarnation(names), held.to_json())])
            await asyncio.sleep(5)
            for number, what in enumerate(("lost", "quarantine"), 1):
                said: dict[str, object] = {"pod_uid": UID}
                entry = HistoryEntry(what, names, "delete this Deployment", 1.0, said)  # type: ignore[arg-type]
                put = Put(MINE.history_entry(number, names, what), entry.to_json())
                await store.txn([], [put])
            asked = Drain("another", names, "spot", "operator")
            await store.txn([], [Put(live.drain("another"), asked.to_json())])
            await asyncio.sleep(100)
            state = jobs.state(MINE)
            assert state is not None
            drains = {uid: one for uid, one in state.snapshot.drains.items() if uid == UID}
    return api.calls, drains


@pytest.mark.parametrize(
    ("namespace", "name", "job"),
    [
        ("victim", "payroll-x", "payroll"),
        ("victim", "payroll-x", "mine"),
        ("attacker", "payroll-x", "payroll"),
        ("attacker", "another-name", "mine"),
    ],
)
async def test_nothing_is_done_at_a_pod_that_a_record_only_claims(
    namespace: str, name: str, job: str
) -> None:
    calls, drains = await led(pod(namespace, name, job), "payroll-x")
    assert calls == []
    assert drains == {}


async def test_a_pod_that_agrees_with_its_record_is_served() -> None:
    calls, drains = await led(pod("attacker", "payroll-x", "mine"), "payroll-x")
    owner = "/apis/apps/v1/namespaces/attacker/deployments/payroll"
    assert {
        ("EVENT", "attacker Pod/payroll-x"),
        ("EVENT", "attacker Deployment/payroll"),
        ("GET", owner),
        ("PATCH", owner),
    } <= {*calls}
    assert [one.source for one in drains.values()] == ["controller"]


@pytest.mark.parametrize(
    ("variable", "job"),
    [
        ({"valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{BY_JOB}']"}}}, "nightly-17"),
        ({"value": "digits"}, "digits"),
        ({}, "nightly"),
    ],
)
def test_the_job_of_a_pod_is_the_one_of_its_sidecar(variable: dict[str, Any], job: str) -> None:
    """The pods of a CronJob have its name as their label, and each of its Jobs is a job."""
    labels = {"muster.dev/job": "nightly", BY_JOB: "nightly-17"}
    name = "MUSTER_JOB" if variable else "OTHER"
    sidecar = {"name": "muster", "env": [{"name": name, **variable}]}
    metadata = {"uid": "u", "namespace": "team", "name": "a", "labels": labels}
    seen = pod_seen({"metadata": metadata, "spec": {"initContainers": [sidecar]}})
    for claimed in ("nightly-17", "digits", "nightly"):
        found = pod_of({"u": seen}, JobKeys("team", claimed), "a", "u")
        assert (found is seen) == (claimed == job)


def test_a_long_name_is_compared_as_a_label_can_have_it() -> None:
    job = "j" * 80
    seen = PodSeen("u", "team", "a", "north", None, None, job=job_label(job))
    assert pod_of({"u": seen}, JobKeys("team", job), "a", "u") is seen
    assert pod_of({"u": seen}, JobKeys("team", job + "x"), "a", "u") is None


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
async def reconciled(owners: ScaledOwners | NoOwners) -> AsyncIterator[Desired]:
    """A job with one member, and what becomes desired of it."""
    store = MemoryStore(MemoryEngine(now))
    job = Job(JobPolicy(1, 8, gather_s=60.0))
    await store.txn([], [Put(KEYS.job, job.to_json()), Put(MEMBER, of_today("a"))])
    async with Jobs(store, now, Random(1)).following() as jobs:
        given: Any = owners
        api: Any = None
        reconciler = OwnerReconciler(api, jobs, given, now, scales=True, annotates=False)
        async with beside(reconciler.run()):
            await asyncio.sleep(5)
            yield Desired(store, jobs, reconciler)


class Desired:
    """The number that is desired, and the members that come and go."""

    def __init__(self, store: MemoryStore, jobs: Jobs, reconciler: OwnerReconciler) -> None:
        self.store = store
        self.reconciler = reconciler
        self._jobs = jobs

    @property
    def number(self) -> int | None:
        record = self._jobs.states()[KEYS].snapshot.job
        assert record is not None
        return record.desired

    async def comes(self, name: str) -> None:
        key = KEYS.in_generation(1).member(name)
        await self.store.txn([], [Put(key, of_today(name))])

    async def goes(self, name: str) -> None:
        await self.store.txn([], [Delete(KEYS.in_generation(1).member(name))])


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
    owners = NoOwners()
    async with reconciled(owners) as desired:
        assert owners.reads == 1
        await desired.store.txn([], [Delete(KEYS.job), Delete(MEMBER)])
        await asyncio.sleep(2 * LOOKED_AT_S)
        assert owners.reads == 1
        assert (await desired.reconciler.step()).look_at_s == math.inf
