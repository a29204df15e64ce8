# SPDX-License-Identifier: Apache-2.0
"""What follows jobs never ends in silence, nor for all jobs by what is wrong with one."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from controller import job_events as published
from controller import notice_executor, notices, process
from controller.cluster.collection import Collection
from controller.job_events import EventReporter, job_events
from controller.jobs import Jobs
from controller.notice_executor import NoticeExecutor
from controller.notices import NodeSeen, NoticePolicy
from controller.owners import PodSeen
from rdzv.errors import ConfigError
from rdzv.keys import JobKeys
from rdzv.records.drain import LastCommit
from rdzv.records.job import HistoryEntry, Incarnation, Job
from rdzv.records.policy import JobPolicy
from rdzv.store import Put
from rdzv.store.memory.client import MemoryStore
from tests.support.clocks.virtual import now
from tests.support.records import member
from tests.support.shown import Shown
from tests.support.tasks import beside

pytestmark = pytest.mark.virtual

GOOD, BAD = JobKeys("team", "good"), JobKeys("team", "bad")


class Unreadable(MemoryStore):
    async def page(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("a defect")


class Failing:
    async def get(self, path: str, *, accept: str) -> dict[str, Any]:
        raise ValueError("a defect")


@pytest.mark.parametrize(
    "followed",
    [
        lambda: Jobs(Unreadable(), now, Random(1)).following(),
        lambda: Collection(Failing(), "/api/v1/pods", dict).following(),  # type: ignore[arg-type]
    ],
)
async def test_a_watch_that_fails_ends_those_who_wait_for_it(
    followed: Callable[[], AbstractAsyncContextManager[Any]],
) -> None:
    with pytest.raises(BaseExceptionGroup) as ended:
        async with followed() as shown:
            await shown.changed_after(0)
    assert ended.group_contains(ValueError, match="a defect")


async def test_what_fails_is_told_and_begun_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = [
        ExceptionGroup("watch", [ExceptionGroup("inner", [ConfigError("port 9444 is taken")])]),
        ExceptionGroup("watch", [ValueError("a defect")]),
        KeyError("another"),
    ]
    begun_again = asyncio.Event()

    async def follow(*_: Any) -> None:
        if faults:
            raise faults.pop(0)
        begun_again.set()
        await asyncio.sleep(1000)

    monkeypatch.setattr(process, "follow", follow)
    nothing: Any = None
    async with beside(process.keep_following(nothing, nothing, nothing, nothing)):
        await begun_again.wait()
    told = [(one.event, one.message) for one in caplog.records]  # type: ignore[attr-defined]
    assert [event for event, _ in told] == ["not_following", "defect", "defect"]
    assert "port 9444 is taken" in told[0][1]


class Said:
    """Events, as they are said."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []
        self.series: list[Any] = []
        self.enough = asyncio.Event()

    def say(self, about: Any, reason: str, message: str, **_: Any) -> None:
        self.said.append((about["name"], message))
        self.enough.set()

    async def run(self) -> None:
        await asyncio.sleep(1_000_000)


class OwnersByName:
    def time_to_save_s(self, state: Any) -> None:
        return None

    def pod(self, keys: JobKeys, name: str, uid: str) -> None:
        return None

    async def reference(self, state: Any) -> Any:
        return {"name": state.keys.job_name}


async def reports(store: MemoryStore, told: int | None, change: Callable[[], Any]) -> Said:
    """What a leader says that comes to a store, ``told`` up to a revision; then comes a change."""
    events, owners = Said(), OwnersByName()
    leadership = SimpleNamespace(told=told, progress=lambda: None)
    async with Jobs(store, now, Random(1)).following() as jobs:
        given: tuple[Any, ...] = (jobs, owners, events, leadership)
        async with beside(EventReporter(*given).run()):
            await jobs.changed_after(0)
            await asyncio.sleep(5)
            await change()
            await events.enough.wait()
            await asyncio.sleep(5)
    return events


async def test_a_job_that_brings_out_a_defect_silences_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def job_events_with_a_defect(before: Any, state: Any, since: int, *more: Any) -> Any:
        if state.keys == BAD and before is not None:
            raise ValueError("a defect")
        return job_events(before, state, since)

    monkeypatch.setattr(published, "job_events", job_events_with_a_defect)
    store = MemoryStore()
    await store.txn([], [Put(keys.job, Job(JobPolicy(1, 4)).to_json()) for keys in (BAD, GOOD)])

    async def both_commit() -> None:
        saved = LastCommit(46, 1, 1).to_json()
        await store.txn([], [Put(keys.last_commit, saved) for keys in (BAD, GOOD)])

    said = await reports(store, None, both_commit)
    assert said.said == [("good", "all ranks have saved step 46")]
    assert [one.event for one in caplog.records] == ["defect"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("of", "part"), [(notices, "decide_notices"), (notice_executor, "first_write")]
)
async def test_a_job_that_brings_out_a_defect_keeps_no_other_from_its_notice(
    of: ModuleType, part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = getattr(of, part)

    def with_a_defect(*given: Any) -> Any:
        if BAD in [getattr(one, "keys", one) for one in given]:
            raise ValueError("a defect")
        return real(*given)

    monkeypatch.setattr(of, part, with_a_defect)
    store = MemoryStore()
    for keys in (BAD, GOOD):
        one = replace(member("a", uid=keys.job_name), version="0.2.0")
        held = Incarnation("a", 1, one.pod_uid)
        puts = [
            Put(keys.job, Job(JobPolicy(1, 4)).to_json()),
            Put(keys.in_generation(1).member("a"), one.to_json()),
            Put(keys.incarnation("a"), held.to_json()),
        ]
        await store.txn([], puts)
    nodes: Any = Shown(n=NodeSeen("n", shutting_down=True))
    pods: Any = Shown(
        **{job: PodSeen(job, "team", "a", "n", None, None, job=job) for job in ("good", "bad")}
    )
    async with Jobs(store, now, Random(1)).following() as jobs:
        await jobs.changed_after(0)
        asking = NoticeExecutor(jobs, nodes, pods, NoticePolicy(), "controller-0", now)
        async with beside(asking.run()):
            await asyncio.sleep(200)
        drains = [state.snapshot.drains for state in map(jobs.state, (BAD, GOOD)) if state]
    assert [len(one) for one in drains] == [0, 1]
    told = [one.event for one in caplog.records if one.levelname == "CRITICAL"]  # type: ignore[attr-defined]
    assert told == ["defect"]


async def test_what_was_before_a_leader_came_is_told_once_and_by_the_first_not_at_all() -> None:
    """Also where the key that a read brings last was written long before the others."""

    def world(number: int) -> Put:
        details: dict[str, object] = {"round": number, "nodes": 2}
        entry = HistoryEntry("round", "a", "", 1.0, details)
        return Put(GOOD.history_entry(number + 1, "a", "round"), entry.to_json())

    for told_rounds, expected in ((None, [2]), (1, [1, 2])):
        store = MemoryStore()
        first = (await store.txn([], [Put(GOOD.job, Job(JobPolicy(1, 4)).to_json())])).revision
        for number in (0, 1):
            await store.txn([], [world(number)])

        async def another(store: MemoryStore = store) -> None:
            await store.txn([], [world(2)])

        said = await reports(store, told_rounds and first + told_rounds, another)
        assert [message for _, message in said.said] == [
            f"a world of 2 nodes trains (round {number})" for number in expected
        ]


async def test_what_was_read_at_the_start_is_out_of_garbage_collections() -> None:
    read = [asyncio.Event(), asyncio.Event()]
    parts: Any = [SimpleNamespace(changed_after=lambda _, one=one: one.wait()) for one in read]
    before = gc.get_freeze_count()
    freezing = asyncio.create_task(process._freeze(parts))
    try:
        read[0].set()
        await asyncio.sleep(0.01)
        assert gc.get_freeze_count() == before
        read[1].set()
        await freezing
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
