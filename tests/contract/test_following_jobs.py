# SPDX-License-Identifier: Apache-2.0
"""What happens to jobs in a store, told to an API server by whichever replica leads."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import pytest

from controller import job_events, leadership, owner_reconciler
from controller import owners as owners_read
from controller.cluster import events as cluster_events
from controller.cluster import paths
from controller.cluster.api import ClusterApi
from controller.cluster.collection import Collection
from controller.cluster.events import Events
from controller.job_events import EventReporter
from controller.jobs import Jobs
from controller.leadership import Leadership
from controller.owner_reconciler import OwnerReconciler
from controller.owners import Owners, pod_seen
from rdzv.keys import JobKeys
from rdzv.records.drain import Drain, LastCommit
from rdzv.records.job import HistoryEntry, Job
from rdzv.records.policy import JobPolicy
from rdzv.store import Put, Store, TxnResult
from tests.support.cluster_api import CALL_S, CLOSED_S, FakeApi, make_patient
from tests.support.records import member
from tests.support.tasks import beside
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.usefixtures("empty_store")

KEYS = JobKeys("team", f"digits-{uuid4().hex}")
LIVE = KEYS.in_generation(1)
LEASE = paths.lease("muster-system", "muster-controller")
EVENTS = "/api/v1/namespaces/team/events/"
OWNER = "/apis/apps/v1/namespaces/team/deployments/trainer"


def pod(name: str) -> dict[str, Any]:
    maker = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "trainer-5d", "uid": "rs"}
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "labels": {"muster.dev/job": KEYS.job_name, "pod-template-hash": "5d"},
            "ownerReferences": [{**maker, "controller": True}],
        },
        "spec": {"nodeName": "node-1", "containers": []},
    }


@pytest.fixture
async def fake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store
) -> AsyncIterator[FakeApi]:
    """An API server with three pods of a Deployment, whose job has a record in the store."""
    await store.txn([], [Put(KEYS.job, Job(JobPolicy(1, 4)).to_json())])
    for of, name, value in (
        (leadership, "RENEW_S", 0.05),
        # Nobody loses the Lease by a stall of the machine: another leader knows no Events of it.
        (leadership, "GIVE_UP_S", 600.0),
        (leadership, "CALL_S", CALL_S),
        (leadership, "LEASE_S", 600.0),
        (cluster_events, "REPEAT_S", 0.1),
        (cluster_events, "AGAIN_S", 0.05),
        (owners_read, "FRESH_S", 0.0),
        (job_events, "OWNER_RETRY_S", 0.05),
        (owner_reconciler, "GATHER_S", 0.05),
    ):
        monkeypatch.setattr(of, name, value)
    make_patient(monkeypatch)
    async with FakeApi(tmp_path) as fake:
        await fake.put(LEASE, {})
        await fake.put(OWNER, {"spec": {"replicas": 2}, "metadata": {"uid": "uid-trainer"}})
        for name in "abc":
            await fake.put(f"/api/v1/namespaces/team/pods/{name}", pod(name))
        yield fake


@asynccontextmanager
async def replica(name: str, fake: FakeApi, store: Store) -> AsyncIterator[None]:
    async with (
        ClusterApi(fake.access) as api,
        Jobs(store, time.monotonic, Random(1)).following() as jobs,
        Collection(api, paths.PODS_OF_JOBS, pod_seen).following() as pods,
    ):
        leading = Leadership(api, LEASE, name, time.monotonic)

        async def lead() -> None:
            await pods.changed_after(0)
            owners = Owners(api, pods, time.monotonic)
            async with asyncio.TaskGroup() as tasks:
                events = Events(api, time.monotonic)
                tasks.create_task(EventReporter(jobs, owners, events, leading).run())
                owned = OwnerReconciler(
                    api, jobs, owners, time.monotonic, scales=True, annotates=True
                )
                tasks.create_task(owned.run())

        async with beside(leading.lead(lead)):
            yield


@asynccontextmanager
async def leader(fake: FakeApi, store: Store) -> AsyncIterator[dict[str, Any]]:
    """A replica that leads; yields the Lease as it first has it."""
    async with replica("one", fake, store):
        yield await fake.until(LEASE, lambda lease: told(lease) > 0)


def seen(fake: FakeApi) -> dict[tuple[str, str], tuple[int, str]]:
    """Count and message of each Event, by its object and reason."""
    found: dict[tuple[str, str], tuple[int, str]] = {}
    for path, one in fake.objects.items():
        if path.startswith(EVENTS):
            about = one["involvedObject"]
            key = (f"{about['kind']}/{about['name']}", one["reason"])
            assert key not in found, "one Event for each object and reason"
            found[key] = (one["count"], one["message"])
    return found


async def until(
    fake: FakeApi, holds: Callable[[dict[tuple[str, str], tuple[int, str]]], bool]
) -> None:
    async with asyncio.timeout(DEADLINE_S), fake._changed:
        await fake._changed.wait_for(lambda: holds(seen(fake)))


def told(lease: dict[str, Any]) -> int:
    return int(lease["metadata"].get("annotations", {}).get(leadership.TOLD, 0))


async def join(store: Store, *names: str) -> int:
    puts = [Put(LIVE.member(n), replace(member(n), version="0.2.0").to_json()) for n in names]
    return (await store.txn([], puts)).revision


async def test_news_are_events_of_pods_and_of_their_owner(fake: FakeApi, store: Store) -> None:
    await join(store, "a")
    async with replica("one", fake, store):
        # What was before the controller came is no news.
        await fake.until(LEASE, lambda lease: told(lease) > 0)
        assert seen(fake) == {}
        await join(store, "b")
        drain = Drain("uid-b", "b", "the node is cordoned", "controller", requested_by="c")
        await store.txn([], [Put(LIVE.drain("uid-b"), drain.to_json())])
        await store.txn(
            [],
            [
                Put(LIVE.drain("uid-b"), replace(drain, outcome="committed", step=46).to_json()),
                Put(KEYS.last_commit, LastCommit(46, 1, 1).to_json()),
            ],
        )
        await until(
            fake,
            lambda told: {("Pod/b", "Committed"), ("Deployment/trainer", "Committed")} <= {*told},
        )
        drained = seen(fake)["Pod/b", "Draining"]
        assert drained == (1, "b: the node is cordoned (asked for by c)")
        assert "46" in seen(fake)["Pod/b", "Committed"][1]


async def test_events_are_written_once_the_api_server_is_back(fake: FakeApi, store: Store) -> None:
    async with leader(fake, store):
        before = told(fake.objects[LEASE])
        fake.busy_once = {EVENTS.rstrip("/")}
        revision = await join(store, "a")
        await until(fake, lambda told: ("Pod/a", "Joined") in told)
        await fake.until(LEASE, lambda lease: told(lease) >= revision)
    assert before < revision
    assert seen(fake)["Pod/a", "Joined"][0] == 1


async def test_the_next_leader_tells_once_what_it_missed(fake: FakeApi, store: Store) -> None:
    async with replica("one", fake, store), replica("two", fake, store):
        await fake.until(LEASE, lambda lease: told(lease) > 0)
        revision = await join(store, "a")
        await until(fake, lambda told: ("Pod/a", "Joined") in told)
        await fake.until(LEASE, lambda lease: told(lease) >= revision)
    assert fake.objects[LEASE]["spec"]["holderIdentity"] == ""
    await join(store, "b")
    await store.txn([], [Put(KEYS.last_commit, LastCommit(46, 1, 1).to_json())])
    async with replica("three", fake, store):
        await until(
            fake, lambda told: {("Pod/b", "Joined"), ("Deployment/trainer", "Committed")} <= {*told}
        )
    assert {count for count, _ in seen(fake).values()} == {1}
    written = [call for call in fake.calls if call == ("POST", EVENTS.rstrip("/"))]
    assert len(written) == len(seen(fake))
    assert json.loads(json.dumps(fake.objects[LEASE]))["spec"]["leaseTransitions"] >= 2


async def form(store: Store, *rounds: int) -> None:
    for number in rounds:
        details: dict[str, object] = {"round": number, "nodes": 2}
        entry = HistoryEntry("round", "a", "all have joined", 1.0, details)
        revision = (await store.range(KEYS.job)).revision
        await store.txn(
            [], [Put(KEYS.history_entry(revision, "a", f"round {number}"), entry.to_json())]
        )


@pytest.mark.parametrize("had", ["owed another Event", "died"])
async def test_the_worlds_of_a_time_without_replicas_are_told_by_the_next_leader(
    fake: FakeApi, store: Store, monkeypatch: pytest.MonkeyPatch, had: str
) -> None:
    """The one before had noted less than it had told."""
    monkeypatch.setattr(cluster_events, "REPEAT_S", 30.0)
    monkeypatch.setattr(leadership, "LEASE_S", 1.0)
    await join(store, "a", "b")
    reformed = ("Deployment/trainer", "Reformed")
    async with leader(fake, store) as before:
        for step in (46, 47) if had == "owed another Event" else ():
            saved = LastCommit(step, 1, 1).to_json()
            await store.txn([], [Put(KEYS.last_commit, saved)])
            await until(fake, lambda told: ("Deployment/trainer", "Committed") in told)
        await form(store, 0)
        await until(fake, lambda told: reformed in told)
    if had == "died":
        held = fake.objects[LEASE]
        await fake.put(LEASE, {**held, "metadata": {**held["metadata"], **noted(before)}})
    await form(store, 1, 2)
    newest = "a world of 2 nodes trains (round 2)"
    async with replica("two", fake, store):
        async with asyncio.timeout(CLOSED_S), fake._changed:
            await fake._changed.wait_for(lambda: newest in messages(fake, "Reformed"))
        await fake.until(LEASE, lambda lease: told(lease) > told(before))
    assert messages(fake, "Reformed").count(newest) == 1


@pytest.mark.parametrize("owner_was", ["never read", "read before"])
async def test_events_wait_for_an_unread_owner(fake: FakeApi, store: Store, owner_was: str) -> None:
    reading, saved = ("GET", OWNER), ("Deployment/trainer", "Committed")
    async with leader(fake, store):
        if owner_was == "never read":
            fake.busy = {OWNER}
        await join(store, "a", "b")
        await until(fake, lambda told: ("Pod/a", "Joined") in told)
        if owner_was == "read before":
            await store.txn([], [Put(KEYS.last_commit, LastCommit(46, 1, 1).to_json())])
            await until(fake, lambda told: saved in told)
            fake.busy = {OWNER}
        asked = fake.calls.count(reading)
        revision = (await join_and_save(store, 47)).revision
        if owner_was == "never read":
            await fake.until_called(reading, asked + 4)
            assert told(fake.objects[LEASE]) < revision
            fake.busy = set()
        await until(fake, lambda told: "47" in told.get(saved, (0, ""))[1])
        await fake.until(LEASE, lambda lease: told(lease) >= revision)
    assert {about.partition("/")[0] for about, _ in seen(fake)} == {"Pod", "Deployment"}


async def test_events_of_an_owner_that_cannot_be_read_for_long_are_told_at_what_the_pod_shows(
    fake: FakeApi, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners_read, "UNREAD_S", 0.2)
    fake.busy = {OWNER}
    async with leader(fake, store):
        revision = (await join_and_save(store, 46)).revision
        await until(fake, lambda told: ("ReplicaSet/trainer-5d", "Committed") in told)
        await fake.until(LEASE, lambda lease: told(lease) >= revision)
    assert seen(fake)["ReplicaSet/trainer-5d", "Committed"][0] == 1


async def join_and_save(store: Store, step: int) -> TxnResult:
    await join(store, "c")
    return await store.txn([], [Put(KEYS.last_commit, LastCommit(step, 1, 1).to_json())])


def noted(lease: dict[str, Any]) -> dict[str, Any]:
    return {"annotations": lease["metadata"]["annotations"]}


def messages(fake: FakeApi, reason: str) -> list[str]:
    found = [one for path, one in fake.objects.items() if path.startswith(EVENTS)]
    return [one["message"] for one in found if one["reason"] == reason]


async def test_replicas_become_desired_and_are_noted(fake: FakeApi, store: Store) -> None:
    async with leader(fake, store):
        await join(store, "a")
        notes = await fake.until(OWNER, lambda owner: "annotations" in owner["metadata"])
        assert notes["metadata"]["annotations"] == {
            "muster.dev/members-wanted": "4",
            "muster.dev/members-there": "1",
        }
        watch = store.watch(KEYS.job, (await store.range(KEYS.job)).kvs[0].mod_revision)
        async with asyncio.timeout(CLOSED_S):
            async for batch in watch:
                wanted = [Job.from_kv(event.kv).desired for event in batch.events]
                if wanted and wanted[-1] == 2:
                    break
        await watch.aclose()
