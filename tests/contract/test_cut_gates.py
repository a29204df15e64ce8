# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait for a store that takes no writes: they train on, and nothing is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from agent.drain.gate_writer import CUT_S, PROBE_S
from rdzv.errors import StoreAmbiguous, StoreUnavailable
from rdzv.store import Operation
from tests.support.sidecars.cable import Moment
from tests.support.sidecars.drains import Job, job
from tests.support.sidecars.ranks import Loop

pytestmark = pytest.mark.virtual

LATEST_S = CUT_S + 3 * PROBE_S
"""By then ranks train on: a write that is not answered may take some seconds to be given up."""


async def trains_on(one: Job, *, within_s: float = LATEST_S) -> None:
    began_s = one.clock()
    await one.goes_on()
    assert one.clock() - began_s < within_s


async def stands(one: Job) -> None:
    """Wait until no rank makes a step any more."""
    world = one.ranks_of[one.number]
    made = -1
    while made != (made := sum(len(rank.log) for rank in world.values())):  # noqa: ASYNC110
        await asyncio.sleep(1)


async def refused_from(phase: str, one: Job) -> None:
    """Drain b; from one phase on the store takes no writes."""
    one.pods["b"].notice("control", 600)
    await one.until(one.phase_is(phase))
    one.refuse_writes()
    await stands(one)


@pytest.mark.parametrize("phase", ["hold", "commit", "done"])
async def test_ranks_train_on_and_the_drain_is_seen_through_once_the_store_takes_writes(
    phase: str,
) -> None:
    # In done b is held below min, and nobody may write that.
    async with job("ab", least=2 if phase == "done" else 1, trains="ab") as one:
        await refused_from(phase, one)
        await trains_on(one)
        for _ in range(3):
            await trains_on(one, within_s=5)
        one.take_writes()
        if phase == "done":
            await one.add("c")
            await one.ask("c")
        await one.until(lambda: one.snapshot.drains["uid-b"].outcome == "committed")
        assert one.commit.phase == "done"


async def test_i7_an_acknowledgement_that_was_sent_may_still_count_and_steps_are_repeated() -> None:
    async with job("ab", trains="ab") as one:
        one.pods["b"].notice("control", 600)
        await one.until(one.phase_is("commit"))
        for pod in one.pods.values():
            pod.cable.on_txn = answers_nothing()
        await stands(one)
        await trains_on(one)
        one.take_writes()
        await one.until(lambda: one.snapshot.drains["uid-b"].outcome == "committed")
        (step,) = {step for _, step in one.done}
        for rank in one.ranks_of[0].values():
            assert ("save", step) in rank.log
    assert min(one.repeats.values()) > 0


def answers_nothing() -> Callable[[Moment, Sequence[Operation]], None]:
    """The next acknowledgement lands, and is not answered; after that no write is taken."""
    landed = False

    def fail(moment: Moment, operations: Sequence[Operation]) -> None:
        nonlocal landed
        if landed and moment == "sending":
            raise StoreUnavailable("no space")
        if moment == "answering":
            landed = True
            raise StoreAmbiguous("no answer")

    return fail


@pytest.mark.parametrize("cut", [False, True], ids=["it is read", "nor is it read"])
async def test_a_sidecar_that_starts_again_stops_no_rank_that_has_given_up(cut: bool) -> None:
    async with job("ab", trains="ab") as one:
        await refused_from("commit", one)
        await trains_on(one)
        for pod in one.pods.values():
            await pod.kill()
            await pod.start(cut=cut)
        one.refuse_writes()
        for _ in range(3):
            await trains_on(one, within_s=5)
        for pod in one.pods.values():
            pod.cable.mend()
        one.take_writes()
        await one.until(lambda: one.snapshot.drains["uid-b"].outcome == "committed")
        first, *_ = (commit.epoch for commit in one.commits if commit.phase == "commit")
        done = {commit.epoch for commit in one.commits if commit.phase == "done"}
        assert first not in done, "what was given up counts for no rank"


async def test_a_sidecar_that_starts_without_the_store_lets_ranks_train_on() -> None:
    async with job("ab", trains="ab") as one:
        await refused_from("commit", one)
        for pod in one.pods.values():
            await pod.kill()
            await pod.start(cut=True)
        await trains_on(one)


async def test_a_slow_save_of_others_parks_a_rank_for_as_long_as_it_takes() -> None:
    slow = Loop(save_s=4 * CUT_S)
    async with job("ab", trains="ab", a=slow) as one:
        client = one.pods["b"].notice("control", 900)
        assert await asyncio.wait_for(client._task, 600)
        assert one.commit.phase == "done"
        assert not any(rank.gave_up(1) for rank in one.ranks_of[0].values())


async def test_a_probe_writes_nothing_and_only_while_ranks_wait() -> None:
    async with job("ab", least=2, trains="ab") as one:
        probes: list[float] = []

        def count(moment: Moment, operations: Sequence[Operation]) -> None:
            if moment == "sending" and any("/doctor/" in op.key for op in operations):
                probes.append(one.clock())

        for pod in one.pods.values():
            pod.cable.on_txn = count
        await asyncio.sleep(10 * PROBE_S)
        assert probes == []
        one.pods["b"].notice("control", 600)
        await one.until(one.phase_is("done"))
        seen: list[str] = []
        one.mirror.subscribe(lambda events: seen.extend(event.kv.key for event in events))
        await asyncio.sleep(4 * PROBE_S)
        assert one.commit.phase == "done"
        assert 2 * 3 <= len(probes) <= 2 * 5
        assert not any("/doctor/" in key for key in seen)


async def test_all_ranks_save_on_a_full_disk() -> None:
    async with job("abc", trains="abc") as one:
        for pod in one.pods.values():
            pod.disk_full = True
        assert await one.pods["b"].notice("sigterm", 120).release() == "committed"
