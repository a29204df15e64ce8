# SPDX-License-Identifier: Apache-2.0
"""A job that is not getting on says so once: in its history, and by a metric of its sidecars."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from agent import upkeep
from agent.upkeep import HELD_S, SETTLED_S, StateReporter, is_news
from agent.verdict.states import STATES, State
from rdzv.records.job import HistoryEntry
from tests.support.sidecars.drains import Job, job
from tests.support.sidecars.jobs import KEYS
from tests.support.tasks import beside

pytestmark = pytest.mark.virtual

TOLD_S = SETTLED_S + max(HELD_S.values()) + 60.0


def events_of(one: Job) -> list[str]:
    """The states that the history tells, the oldest first."""
    entries = sorted(one.mirror.under(KEYS.history), key=lambda kv: kv.mod_revision)
    return [
        str(entry.details["state"])
        for entry in map(HistoryEntry.from_kv, entries)
        if entry.what == "state"
    ]


@asynccontextmanager
async def telling_of(one: Job, names: str) -> AsyncIterator[list[StateReporter]]:
    pods = [one.pods[name] for name in names]
    tellers = [StateReporter(pod.kernel, pod.registrar) for pod in pods]
    async with AsyncExitStack() as stack:
        for each in tellers:
            await stack.enter_async_context(beside(each.run()))
        yield tellers


async def test_each_change_of_the_state_is_told_once() -> None:
    async with job("a", least=2) as one:
        async with telling_of(one, "a"):
            await asyncio.sleep(5 * TOLD_S)
        assert events_of(one) == ["below min"]
        await one.add("b")
        async with telling_of(one, "ab"):
            await asyncio.sleep(TOLD_S)
            assert events_of(one) == ["below min", "starting"]
            await one.form("ab")
            await one.training()
            await asyncio.sleep(TOLD_S)
            assert events_of(one) == ["below min", "starting", "training"]


async def test_the_metric_has_one_state_and_none_while_the_store_is_away() -> None:
    async with job("ab", trains="ab") as one, telling_of(one, "b") as (seen,):
        assert seen.by_state() == dict.fromkeys(STATES, 0.0)
        await asyncio.sleep(TOLD_S)
        assert seen.by_state() == dict.fromkeys(STATES, 0.0) | {"training": 1.0}
        assert events_of(one) == [], "an Event was written for a job that trains"
        one.pods["b"].cable.cut()
        await asyncio.sleep(TOLD_S)
        assert seen.by_state() == dict.fromkeys(STATES, 0.0)


async def test_a_defect_of_the_verdict_is_logged_and_ends_no_sidecar(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(upkeep, "verdict", broken)
    async with job("ab", trains="ab") as one, telling_of(one, "ab") as tellers:
        await asyncio.sleep(TOLD_S)
        assert tellers[0].by_state() == dict.fromkeys(STATES, 0.0)
    defects = [one for one in caplog.records if vars(one).get("event") == "defect"]
    assert [one.levelname for one in defects] == ["CRITICAL"]


@pytest.mark.parametrize(
    ("told_before", "now", "held_s", "is_due"),
    [
        ("training", "failing", 29.0, False),
        ("training", "failing", 30.0, True),
        ("training", "gathering", 119.0, False),
        ("training", "gathering", 120.0, True),
        ("failing", "failing", 9000.0, False),
        ("failing", "stuck", 30.0, True),
        ("failing", "training", 30.0, True),
        ("training", "draining", 9000.0, False),
        ("stuck", "done", 30.0, True),
    ],
)
def test_a_state_is_told_after_it_has_lasted(
    told_before: State, now: State, held_s: float, is_due: bool
) -> None:
    assert is_news(told_before, now, held_s) is is_due
