# SPDX-License-Identifier: Apache-2.0
"""Periodic checkpoints: a step that all ranks have saved counts, though nobody drains."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from agent.drain.saves import LOOK_S, STEP_S
from rdzv.records.job import HistoryEntry
from rdzv.records.progress import PodSaves
from rdzv.store import WatchEvent
from tests.support.sidecars.drains import HERE, Job, job
from tests.support.sidecars.jobs import KEYS
from tests.support.sidecars.ranks import Loop

pytestmark = pytest.mark.virtual


def reports(one: Job) -> dict[str, PodSaves]:
    """What the pods tell of their saves, as the store has it."""
    kvs = one.mirror.under(HERE.saves)
    return {told.member: told for told in map(PodSaves.from_kv, kvs)}


def last_step(one: Job) -> int:
    last = one.snapshot.last_commit
    return -1 if last is None else last.step


async def test_a_job_that_saves_each_step_tells_of_it_at_a_pace() -> None:
    writes: list[str] = []

    def see(events: object) -> None:
        assert isinstance(events, list | tuple)
        writes.extend(event.kv.key for event in events if isinstance(event, WatchEvent))

    async with job("abc", trains="abc", loop=Loop(saves_every=1, save_s=0.01)) as one:
        await one.until(lambda: last_step(one) > -1)
        one.mirror.subscribe(see)
        before, seconds = last_step(one), 20 * LOOK_S
        await asyncio.sleep(seconds)
        assert last_step(one) > before
        for name in "abc":
            assert 10 <= writes.count(HERE.pod_saves(name)) <= seconds / LOOK_S + 1


async def test_without_saves_only_the_pod_of_rank_0_tells_where_it_is() -> None:
    async with job("abc", trains="abc") as one:
        await one.until(lambda: "a" in reports(one))
        first = reports(one)["a"]
        await one.until(lambda: reports(one)["a"].step > first.step)
        assert reports(one).keys() == {"a"}
        assert reports(one)["a"].at_unix_s - first.at_unix_s >= 0
        with suppress(TimeoutError):
            async with asyncio.timeout(STEP_S - 2 * LOOK_S):
                revision = one.mirror.revision
                await one.mirror.reached(revision + 1)
                raise AssertionError("it tells more often than that")


def slow_saves(one: Job) -> list[HistoryEntry]:
    """What the history has of saves that take too long."""
    entries = [HistoryEntry.from_kv(kv) for kv in one.mirror.under(KEYS.history)]
    return [entry for entry in entries if entry.what == "slow"]


async def test_a_save_that_no_drain_has_time_for_is_told_at_the_first_one() -> None:
    slow = Loop(saves_every=20, save_s=100.0)
    async with job("ab", trains="ab", loop=slow) as one:
        await one.until(lambda: any(told.too_slow for told in reports(one).values()))
        await one.until(lambda: bool(slow_saves(one)))
        (first, *_) = slow_saves(one)
        assert first.why == reports(one)[first.member].too_slow
        assert "in a drain (grace 30 s - 5 s reserve)" in first.why
        assert not one.snapshot.drains
