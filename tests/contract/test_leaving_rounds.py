# SPDX-License-Identifier: Apache-2.0
"""Drains as torch's own handlers live through them: who leaves, who goes on, who is let in."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch.distributed", reason="the handlers are torch's")

from launcher_shim.c10d.rounds.inputs import RoundPolicy
from tests.support.clocks.virtual import now
from tests.support.sidecars.rendezvous import Job, job

pytestmark = pytest.mark.virtual

QUICK = RoundPolicy(min_nodes=2, max_nodes=4, last_call_s=0.5, first_call_s=30.0, confirm_s=0.4)
PATIENT = replace(QUICK, last_call_s=30.0)
"""Whoever waits for somebody who does not come waits for longer than any of these tests."""

GRACEFUL_S = 15.0
"""torch looks for waiters and asks for the new round once a second; who
waited for somebody would wait for twice as long."""


def times_formed_again(one: Job) -> dict[str, int]:
    return {name: torchrun.restarts for name, torchrun in one.torchruns.items()}


@pytest.mark.parametrize(("world", "leavers"), [("abc", "a"), ("abc", "b"), ("abcd", "ac")])
async def test_the_others_form_again_at_once_when_leaves_are_granted(
    world: str, leavers: str
) -> None:
    others = [name for name in world if name not in leavers]
    formed_again = {**dict.fromkeys(world, 0), **dict.fromkeys(others, 1)}
    async with job(PATIENT, world=world) as one:
        one.leaves(leavers)
        began = now()
        one.grants(leavers)
        assert await one.world("".join(others)) == 1
        assert now() - began < GRACEFUL_S
        assert times_formed_again(one) == formed_again

        for name in leavers:
            one.torchruns[name].order("end")
        await one.until(lambda: all(one.torchruns[name].ended for name in leavers))
        await one.passed(1.5)
        assert times_formed_again(one) == formed_again
        assert [torchrun.failure for torchrun in one.everyone] == [None] * len(world)


async def test_everybody_granted_at_once_ends_the_round_and_nobody_restarts() -> None:
    async with job(QUICK, world="abc") as one:
        one.leaves("abc")
        one.grants("abc")
        rendezvous = one.sidecars["a"].rendezvous
        await one.until(lambda: rendezvous.round.number == 1)
        await one.passed(1.5)
        assert times_formed_again(one) == {"a": 0, "b": 0, "c": 0}
        assert not rendezvous.round.complete
        for torchrun in one.everyone:
            torchrun.order("end")
        await one.until(lambda: all(torchrun.ended for torchrun in one.everyone))
        assert rendezvous.round.closed == ""


async def test_who_is_finishing_is_left_in_peace() -> None:
    async with job(QUICK, world="abc") as one:
        one.leaves("b")
        await one.torchruns["a"].comes_to_the_exit_barrier()
        one.grants("b")
        await one.passed(1.5)
        assert times_formed_again(one) == {"a": 0, "b": 0, "c": 0}
        one.torchruns["b"].order("finish")
        await one.until(lambda: one.torchruns["b"].ended)
        rendezvous = one.sidecars["c"].rendezvous
        await one.until(lambda: rendezvous.snapshot().nodes["b"].left_reason == "done")
        for name in "ac":
            one.torchruns[name].order("finish")
        await one.until(lambda: all(torchrun.ended for torchrun in one.everyone))
        assert [torchrun.failure for torchrun in one.everyone] == [None, None, None]
        await one.until(lambda: rendezvous.round.closed == "success")
        assert times_formed_again(one) == {"a": 0, "b": 0, "c": 0}


async def test_a_round_that_finishes_is_not_over_because_all_may_leave() -> None:
    async with job(QUICK, world="ab") as one:
        await one.torchruns["a"].comes_to_the_exit_barrier()
        one.grants("ab")
        await one.passed(1)
        assert one.sidecars["a"].rendezvous.round.number == 0
        for torchrun in one.everyone:
            torchrun.order("finish")
        await one.until(lambda: all(torchrun.ended for torchrun in one.everyone))
        assert [torchrun.failure for torchrun in one.everyone] == [None, None]


async def finishes_before_the_others(one: Job, name: str) -> None:
    """Let its workers be done, and its time in the exit barrier be over; it leaves."""
    one.torchruns[name].order("wait")
    await one.until(lambda: one.sidecars[name].rendezvous.round.finishing)
    one.end_time_in_exit_barrier()
    await one.until(lambda: one.torchruns[name].ended)


async def test_a_leaver_that_finishes_last_closes_the_run() -> None:
    async with job(PATIENT, world="ab") as one:
        await finishes_before_the_others(one, "a")
        one.leaves("b")
        one.torchruns["b"].order("finish")
        await one.until(lambda: one.torchruns["b"].ended)
        await one.until(lambda: one.sidecars["a"].rendezvous.round.closed == "success")
        assert [torchrun.failure for torchrun in one.everyone] == [None, None]


async def test_a_leaver_that_finishes_before_the_others_closes_nothing() -> None:
    async with job(PATIENT, world="ab") as one:
        one.leaves("a")
        await finishes_before_the_others(one, "a")
        await one.passed(1)
        assert one.sidecars["b"].rendezvous.round.closed == ""
        one.torchruns["b"].order("finish")
        await one.until(lambda: one.sidecars["b"].rendezvous.round.closed == "success")


@pytest.mark.parametrize("granted", [False, True])
async def test_a_leaver_that_closes_the_rendezvous_closes_nothing(granted: bool) -> None:
    """As torch 2.3 to 2.7 does at SIGTERM, and any torch whose workers failed for good."""
    async with job(PATIENT, world="abc") as one:
        one.leaves("b")
        if granted:
            one.grants("b")
            assert await one.world("ac") == 1
        leaver = one.torchruns["b"]
        leaver.order("fail")
        await one.until(lambda: leaver.ended)
        assert await one.world("ac") == 1
        await one.passed(1)
        assert leaver.failure is None
        assert one.sidecars["a"].rendezvous.round.closed == ""
        assert times_formed_again(one) == {"a": 1, "b": 0, "c": 1}
