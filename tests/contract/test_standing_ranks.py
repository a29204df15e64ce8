# SPDX-License-Identifier: Apache-2.0
"""Worlds whose ranks stand still: what their sidecars ask for and report."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Literal

import pytest

from agent.drain.saves import LOOK_S, STEP_S
from launcher_shim.rundir import layout
from launcher_shim.rundir.rank_reports import StackFrame
from rdzv.records.progress import PodSaves
from tests.support.sidecars.drains import HERE, Job, Pod, job
from tests.support.sidecars.ranks import Loop

pytestmark = pytest.mark.virtual

STEPS = Loop(step_s=0.5)
LONG_S = 120.0
WAITS = [StackFrame("/x/site-packages/torch/distributed/distributed_c10d.py", 3, "all_reduce")]


def still(one: Job) -> dict[str, list[str]]:
    """What each pod says that its ranks do."""
    told = map(PodSaves.from_kv, one.mirror.under(HERE.saves))
    return {pod.member: [rank.doing for rank in pod.still] for pod in told if pod.still}


def stops(one: Job, name: str) -> None:
    for pod in one.pods.values():
        pod.run_dir.stacked = {0: ("S", WAITS)}
        pod.stop_ranks()
    one.pods[name].run_dir.stacked = {0: ("T", [])}


def asked(pod: Pod) -> int:
    return int(json.loads(pod.files[layout.STACKS_ASKED])["ask"].rpartition("-")[2])


async def test_each_pod_reports_what_its_ranks_do_and_that_they_move_again() -> None:
    async with job("abc", trains="abc", loop=STEPS) as one:
        await asyncio.sleep(LONG_S)
        assert still(one) == {}
        stops(one, "b")
        await one.until(lambda: len(still(one)) == 3)
        assert still(one) == {"a": ["collective"], "b": ["stopped"], "c": ["collective"]}
        for pod in one.pods.values():
            pod.resume_ranks()
        await one.until(lambda: still(one) == {})


async def test_ranks_that_still_stand_are_asked_again() -> None:
    async with job("ab", trains="ab", loop=STEPS) as one:
        await asyncio.sleep(LONG_S)
        stops(one, "b")
        await one.until(lambda: len(still(one)) == 2)
        one.pods["b"].run_dir.stacked = {0: ("S", WAITS)}
        await one.until(lambda: still(one) == {"a": ["collective"], "b": ["collective"]})
        assert asked(one.pods["b"]) > 1


def to_end(one: Job) -> list[str]:
    """The pods whose ``muster-run`` was asked to end a rank."""
    asked = {name: pod.files.get(layout.STACKS_ASKED, b"{}") for name, pod in one.pods.items()}
    return [name for name, question in asked.items() if json.loads(question).get("end")]


async def looks() -> AsyncIterator[None]:
    for _ in range(int(LONG_S / LOOK_S)):
        await asyncio.sleep(LOOK_S)
        yield


async def test_the_rank_that_keeps_its_world_from_training_is_ended_where_that_is_wanted() -> None:
    async with job("abc", trains="abc", loop=STEPS, when_stuck="reform") as one:
        await asyncio.sleep(LONG_S)
        stops(one, "b")
        await one.until(lambda: len(still(one)) == 3)
        assert to_end(one) == []
        ended = [to_end(one) async for _ in looks()]
        assert ["b"] in ended
        assert {*map(tuple, ended)} <= {(), ("b",)}
        for pod in one.pods.values():
            pod.resume_ranks()
        await one.until(lambda: still(one) == {})


SAVES = [StackFrame("/app/train.py", 3, "save_checkpoint")]


@pytest.mark.parametrize(
    ("when_stuck", "stack"),
    [
        ("reform", ("S", WAITS)),
        ("reform", ("S", SAVES)),
        ("reform", ("S", [])),
        ("tell", ("T", [])),
    ],
    ids=["it waits", "it saves", "it is unknown", "it is only to be told of"],
)
async def test_no_rank_is_ended_without_need(
    when_stuck: Literal["tell", "reform"], stack: tuple[str, list[StackFrame]]
) -> None:
    async with job("abc", trains="abc", loop=STEPS, when_stuck=when_stuck) as one:
        await asyncio.sleep(LONG_S)
        stops(one, "b")
        one.pods["b"].run_dir.stacked = {0: stack}
        await one.until(lambda: len(still(one)) == 3)
        assert not any([to_end(one) async for _ in looks()])


async def test_ranks_whose_muster_run_gives_no_stacks_are_reported_as_such() -> None:
    async with job("ab", trains="ab", loop=STEPS) as one:
        await asyncio.sleep(LONG_S)
        for pod in one.pods.values():
            pod.stop_ranks()
        await one.until(lambda: still(one) == {"a": ["unknown"], "b": ["unknown"]})


@pytest.mark.parametrize(
    "loop", [Loop(step_s=0.5, saves_every=40, save_s=10), Loop(step_s=0.5, steps_a_loop=200)]
)
async def test_slow_saves_and_evaluations_between_blocks_ask_for_nothing(loop: Loop) -> None:
    async with job("ab", trains="ab", loop=loop) as one:
        await asyncio.sleep(5 * LONG_S)
        assert still(one) == {}
        assert all(layout.STACKS_ASKED not in pod.files for pod in one.pods.values())


async def test_ranks_that_wait_for_a_save_of_a_drain_are_asked_for_nothing() -> None:
    async with job("ab", trains="ab", loop=STEPS, a=Loop(step_s=0.5, save_s=60)) as one:
        await asyncio.sleep(LONG_S)
        assert await one.pods["b"].notice("sigterm", 300).release() == "committed"
        assert layout.STACKS_ASKED not in one.pods["a"].files


async def test_a_world_that_trains_reports_no_more_often_than_before() -> None:
    async with job("ab", trains="ab", loop=STEPS) as one:
        await asyncio.sleep(LONG_S)
        revision = one.mirror.revision
        await asyncio.sleep(10 * STEP_S)
        assert one.mirror.revision - revision <= 11
    assert LOOK_S < STEP_S
