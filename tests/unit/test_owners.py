# SPDX-License-Identifier: Apache-2.0
"""What owners say of their jobs, what is written at them, and the controller's view of all jobs."""

from __future__ import annotations

import asyncio
import math
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from controller import notices
from controller.jobs import Jobs
from controller.notice_executor import NoticeExecutor
from controller.notices import NodeSeen, NoticePolicy
from controller.owner_kinds import Scale, desired_nodes, is_autoscaled, replicas_of, steady_s
from controller.owners import EVERY_S, Owners, PodSeen, due_s, pod_seen
from injection.kinds import KINDS
from rdzv.keys import ROOT, JobKeys
from rdzv.records.drain import LastCommit
from rdzv.records.job import HistoryEntry, Job
from rdzv.records.policy import JobPolicy
from rdzv.store import Put
from rdzv.store.memory.client import MemoryStore
from tests.support.clocks.virtual import now
from tests.support.records import member
from tests.support.shown import Shown
from tests.support.tasks import beside

OURS = HistoryEntry("set", "controller", "desired is 3 (before: none)", 1.0, {"replicas": 3})
THEIRS = HistoryEntry("set", "me@desk", "desired is 2 (before: 3)", 2.0)
MAX = HistoryEntry("set", "me@desk", "max is 8 (before: 4)", 2.0)


VOLCANO = "batch.volcano.sh/v1alpha1"
ASKS = {"metadata": {"labels": {"muster.dev/inject": "true"}}}
REFUSES = {"metadata": {"labels": {"muster.dev/inject": "false"}}}
INJECTED = {"metadata": {"annotations": {"muster.dev/added": "spec/volumes"}}}
FIVE = {"replicas": 5}


def job_set(*parts: tuple[int | None, int | None, dict[str, Any]]) -> dict[str, Any]:
    """A JobSet; of each part the replicas, the parallelism and the pod template."""
    jobs = []
    for replicas, parallelism, template in parts:
        spec = {"template": template}
        job: dict[str, Any] = {"template": {"spec": spec}}
        jobs.append(job if replicas is None else {**job, "replicas": replicas})
        if parallelism is not None:
            job["template"]["spec"] = {**spec, "parallelism": parallelism}
    return {"kind": "JobSet", "spec": {"replicatedJobs": jobs}}


def groups(**group: Any) -> dict[str, Any]:
    """A LeaderWorkerSet of two groups."""
    return {"kind": "LeaderWorkerSet", "spec": {"replicas": 2, "leaderWorkerTemplate": group}}


@pytest.mark.parametrize(
    ("owner", "replicas"),
    [
        ({"kind": "Deployment", "spec": {"replicas": 3}}, 3),
        ({"kind": "Job", "spec": {"parallelism": 4, "completions": 9}}, 4),
        (
            {
                "kind": "PyTorchJob",
                "spec": {
                    "pytorchReplicaSpecs": {"Master": {"replicas": 1}, "Worker": {"replicas": 2}}
                },
            },
            3,
        ),
        ({"kind": "Job", "spec": {"parallelism": 4, "completions": 2}}, 2),
        ({"kind": "MPIJob", "spec": {"mpiReplicaSpecs": {"Launcher": {}, "Worker": FIVE}}}, 5),
        ({"kind": "MPIJob", "spec": {"mpiReplicaSpecs": {"Launcher": {"replicas": 1}}}}, None),
        (job_set((2, 3, {})), 6),
        (job_set((1, 3, {}), (None, None, {})), 4),
        (job_set((1, None, {}), (1, 3, ASKS)), 3),
        (job_set((1, None, {}), (2, 3, INJECTED)), 6),
        (job_set((1, 2, REFUSES), (1, 3, {})), 3),  # the namespace asks for both
        (job_set((1, 2, REFUSES)), None),
        ({"kind": "JobSet", "spec": {"replicas": 3}}, None),
        (groups(size=4, workerTemplate=ASKS), 8),
        (groups(size=4, workerTemplate=ASKS, leaderTemplate=ASKS), 8),
        (groups(size=4, workerTemplate=ASKS, leaderTemplate={}), 6),
        (groups(workerTemplate=ASKS), 2),
        ({"kind": "LeaderWorkerSet", "spec": {}}, None),
        ({"kind": "Deployment", "spec": None}, None),
        (
            {"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "spec": {"parallelism": 4}},
            None,
        ),
        ({}, None),
    ],
)
def test_replicas_are_read_where_the_kind_has_them(owner: Any, replicas: int | None) -> None:
    versions = {kind: f"{group}/v1" for group, kind in KINDS if group != "batch.volcano.sh"}
    version = versions.get(owner.get("kind"), "v1")
    assert replicas_of({"apiVersion": version, **owner}) == replicas


@pytest.mark.parametrize(
    ("replicas", "seen", "desired", "history", "written"),
    [
        (3, None, None, [], 3),
        (3, None, 3, [OURS], None),
        (5, None, 3, [OURS], 4),  # no more than max
        (1, None, None, [], 2),  # no fewer than min
        (0, None, 3, [OURS], None),  # a night without pods
        (None, None, None, [], None),
        (3, None, 2, [OURS, THEIRS], None),  # by hand, and nothing was scaled since
        (4, None, 2, [OURS, THEIRS], 4),  # scaled since, also where nobody saw it
        (3, 3, 2, [THEIRS], None),
        (3, None, 2, [THEIRS], None),
        (4, 3, 2, [THEIRS], 4),
        (4, 3, 3, [OURS, MAX], 4),
        (3, None, None, [OURS, THEIRS], None),  # by hand to none
        (4, 4, 3, [OURS, THEIRS], None),  # they were desired already when they became 4
        (3, 4, 4, [OURS, THEIRS], 3),
    ],
)
def test_replicas_become_desired_unless_a_person_has_said_otherwise_since(
    replicas: int | None,
    seen: int | None,
    desired: int | None,
    history: list[HistoryEntry],
    written: int | None,
) -> None:
    scale, why = desired_nodes(replicas, seen, Job(JobPolicy(2, 4), desired=desired), history)
    assert (scale and scale.desired) == written
    assert why


def test_more_by_an_autoscaler_is_desired_only_once_it_lasts() -> None:
    job = Job(JobPolicy(2, 8, gather_s=60.0), desired=3)
    assert steady_s(Scale(4, 4), job, autoscaled=True) == 60.0
    assert steady_s(Scale(4, 4), job, autoscaled=False) == 0.0
    assert steady_s(Scale(2, 2), job, autoscaled=True) == 0.0
    assert steady_s(Scale(4, 4), Job(JobPolicy(2, 8, gather_s=60.0)), autoscaled=True) == 0.0


def test_an_autoscaler_is_known_by_its_field() -> None:
    replicas: dict[str, Any] = {"f:spec": {"f:replicas": {}}}
    autoscaler = {"manager": "kube-controller-manager", "subresource": "scale"}
    assert is_autoscaled({"managedFields": [{**autoscaler, "fieldsV1": replicas}]})
    worker = {"f:spec": {"f:pytorchReplicaSpecs": {"f:Worker": replicas["f:spec"]}}}
    assert is_autoscaled({"managedFields": [{**autoscaler, "fieldsV1": worker}]})
    kubectl = {"manager": "kubectl", "subresource": "scale", "fieldsV1": replicas}
    status = {**autoscaler, "subresource": "status", "fieldsV1": {"f:status": {}}}
    assert not is_autoscaled({"managedFields": [kubectl, status]})
    assert not is_autoscaled({})


def test_an_owner_is_written_at_only_now_and_then() -> None:
    assert due_s(100.0, {"a": "1"}, {"a": "1"}, 0.0) == math.inf
    assert due_s(100.0, {"a": "2"}, {"a": "1"}, -math.inf) == 0.0
    assert due_s(100.0, {"a": "2"}, {"a": "1"}, 90.0) == EVERY_S - 10.0


async def test_of_a_large_owner_only_what_is_used_is_kept() -> None:
    metadata = {"uid": "of-d", "annotations": {"muster.dev/members-there": "2", "x": "y" * 100_000}}
    template = {"spec": {"containers": [{"name": "train", "args": ["z" * 100_000]}]}}
    found = {"metadata": metadata, "spec": {"replicas": 3, "template": template}}
    made_by = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "d", "uid": "of-d"}
    shown = {"uid": "u", "name": "d-0", "namespace": "n", "labels": {"muster.dev/job": "job"}}
    pod = {"metadata": {**shown, "ownerReferences": [{**made_by, "controller": True}]}, "spec": {}}

    class Api:
        async def get(self, path: str, timeout_s: float) -> dict[str, Any]:
            return found

    pods: Any = SimpleNamespace(items={"u": pod_seen(pod)})
    members = {"d-0": member("d-0", uid="u")}
    job: Any = SimpleNamespace(keys=JobKeys("n", "job"), snapshot=SimpleNamespace(members=members))
    api: Any = Api()
    owner = await Owners(api, pods, lambda: 0.0).of(job)
    assert owner is not None
    assert (owner.replicas, owner.annotations) == (3, {"muster.dev/members-there": "2"})
    assert len(repr(owner)) < 1000


pytestmark = pytest.mark.virtual

ONE, OTHER = JobKeys("team", "one"), JobKeys("team", "other")
RUN = ONE.in_generation(1).run("digits")

UNREAD = {
    "a launcher's key": RUN.value(b"rank"),
    "a report of saves": f"{ONE.in_generation(1).saves}a",
    "a vote": f"{ONE.in_generation(1).votes_of(3)}a",
    "a key of no job": f"{ROOT}alien",
    "a key that Muster does not spell so": f"{ONE.prefix}g/1/members/%61",
}


async def put(store: MemoryStore, *keys: JobKeys) -> None:
    for one in keys:
        joined = Put(one.in_generation(1).member("a"), member("a", uid=one.job_name).to_json())
        await store.txn([], [Put(one.job, Job(JobPolicy(1, 4)).to_json()), joined])


async def test_the_first_read_of_an_empty_store_is_a_change() -> None:
    async with Jobs(MemoryStore(), now, Random(1)).following() as jobs:
        assert jobs.sequence == 0
        await jobs.changed_after(0)
        assert (jobs.sequence, jobs.states()) == (1, {})


@pytest.mark.parametrize("key", UNREAD.values(), ids=UNREAD.keys())
async def test_a_key_that_no_state_reads_wakes_nobody_and_is_not_kept(key: str) -> None:
    store = MemoryStore()
    await put(store, ONE)
    async with Jobs(store, now, Random(1)).following() as jobs:
        await jobs.changed_after(0)
        before = jobs.sequence, jobs.state(ONE)
        written = await store.txn([], [Put(key, b"1")])
        await jobs.mirror.reached(written.revision)
        await asyncio.sleep(10)
        assert (jobs.sequence, jobs.state(ONE)) == before
        assert key not in jobs.mirror.kvs
        await store.txn([], [Put(RUN.round, b"{}")])
        await jobs.changed_after(before[0])
        assert jobs.state(ONE) is not before[1]


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[JobKeys]:
    """The jobs whose notices are decided, in order."""
    found: list[JobKeys] = []
    real = notices.decide_notices

    def noted(time_s: float, nodes: Any, pods: Any, job: Any, *others: Any) -> Any:
        found.append(job.keys)
        return real(time_s, nodes, pods, job, *others)

    monkeypatch.setattr(notices, "decide_notices", noted)
    return found


async def test_a_change_of_a_job_decides_on_no_other_and_a_change_of_a_node_on_all(
    decided: list[JobKeys],
) -> None:
    store = MemoryStore()
    await put(store, ONE, OTHER)
    nodes: Any = Shown(n=NodeSeen("n"))
    pods: Any = Shown(one=PodSeen("one", "team", "a", "n", None, None))
    async with Jobs(store, now, Random(1)).following() as jobs:
        executor = NoticeExecutor(jobs, nodes, pods, NoticePolicy(), "controller-0", now)
        async with beside(executor.run()):
            await asyncio.sleep(100)
            assert sorted(decided, key=str) == [ONE, OTHER]
            decided.clear()
            await store.txn([], [Put(OTHER.last_commit, LastCommit(5, 1, 1).to_json())])
            await asyncio.sleep(100)
            assert decided == [OTHER]
            decided.clear()
            await nodes.show(n=NodeSeen("n", cordoned=True))
            await asyncio.sleep(100)
            assert {*decided} == {ONE, OTHER}
