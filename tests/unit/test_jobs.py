# SPDX-License-Identifier: Apache-2.0
"""The controller's view of all jobs changes with their states, and with nothing else."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from controller import notices, owner_reconciler
from controller.jobs import Jobs
from controller.notice_executor import NoticeExecutor
from controller.notices import NodeSeen, NoticePolicy
from controller.owner_reconciler import UnplacedWriter
from controller.owners import PodSeen
from rdzv.keys import ROOT, JobKeys
from rdzv.records.drain import LastCommit
from rdzv.records.job import Job
from rdzv.store import Put
from rdzv.store.memory.client import MemoryStore
from tests.support.clocks.virtual import now
from tests.support.records import member
from tests.support.shown import Shown
from tests.support.tasks import beside

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
        await store.txn([], [Put(one.job, Job(1, 4).to_json()), joined])


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


async def test_pods_are_counted_again_only_when_they_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[int] = []
    real = owner_reconciler.unplaced

    def noted(pods: Any) -> Any:
        counted.append(1)
        return real(pods)

    monkeypatch.setattr(owner_reconciler, "unplaced", noted)
    store = MemoryStore()
    await put(store, ONE)
    pods: Any = Shown()
    waits = PodSeen("u", "team", "b", "", None, None, job="one", unplaced=True)
    async with (
        Jobs(store, now, Random(1)).following() as jobs,
        beside(UnplacedWriter(jobs, pods).run()),
    ):
        await asyncio.sleep(100)
        await store.txn([], [Put(ONE.last_commit, LastCommit(5, 1, 1).to_json())])
        await asyncio.sleep(100)
        assert len(counted) == 1
        await pods.show(u=waits)
        await asyncio.sleep(100)
        state = jobs.state(ONE)
        assert state is not None
        assert state.snapshot.job is not None
        assert state.snapshot.job.unplaced == 1
