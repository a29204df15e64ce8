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


async def test_a_cancelled_drain_leaves_no_trace() -> None:
    async with job(PATIENT, world="abc") as one:
        await one.tell(leaving="b")
        await one.passed(1)
        await one.tell()
        await one.passed(1.5)
        assert times_formed_again(one) == {"a": 0, "b": 0, "c": 0}
        one.torchruns["a"].order("rejoin")
        await one.until(lambda: len(one.torchruns["b"].worlds) == 2)
        assert await one.world("abc") == 1


@pytest.mark.parametrize("leaver", ["a", "b"])
async def test_the_others_form_again_at_once_when_a_leave_is_granted(leaver: str) -> None:
    others = "abc".replace(leaver, "")
    async with job(PATIENT, world="abc") as one:
        await one.tell(leaving=leaver)
        began = now()
        await one.tell(granted=leaver)
        assert await one.world(others) == 1
        assert now() - began < GRACEFUL_S
        formed_again = {**dict.fromkeys(others, 1), leaver: 0}
        assert times_formed_again(one) == formed_again

        one.torchruns[leaver].order("end")
        await one.until(lambda: one.torchruns[leaver].ended)
        await one.passed(1.5)
        assert times_formed_again(one) == formed_again
        assert one.torchruns[leaver].failure is None


async def test_two_leaves_at_once_are_one_new_round() -> None:
    async with job(PATIENT, world="abcd") as one:
        await one.tell(leaving="ac")
        await one.tell(granted="ac")
        assert await one.world("bd") == 1
        assert times_formed_again(one) == {"a": 0, "b": 1, "c": 0, "d": 1}
        for name in "ac":
            one.torchruns[name].order("end")
        await one.passed(1.5)
        assert times_formed_again(one) == {"a": 0, "b": 1, "c": 0, "d": 1}


async def test_a_second_leave_while_the_others_form_again_keeps_nobody_waiting() -> None:
    async with job(PATIENT, world="abcd") as one:
        await one.tell(granted="a")
        await one.until(lambda: any(t.restarts for t in one.everyone))
        await one.tell(granted="ab")
        await one.world("cd")
        assert one.torchruns["a"].restarts == 0
        assert one.torchruns["b"].restarts <= 1
        assert one.torchruns["b"].failure is None


async def test_everybody_granted_at_once_ends_the_round_and_nobody_restarts() -> None:
    async with job(QUICK, world="abc") as one:
        await one.tell(leaving="abc")
        await one.tell(granted="abc")
        rendezvous = one.sidecars["a"].rendezvous
        await one.until(lambda: rendezvous.round.number == 1)
        await one.passed(1.5)
        assert times_formed_again(one) == {"a": 0, "b": 0, "c": 0}
        assert not rendezvous.round.complete
        for torchrun in one.everyone:
            torchrun.order("end")
        await one.until(lambda: all(torchrun.ended for torchrun in one.everyone))
        assert rendezvous.round.closed == ""


async def test_a_loss_during_a_drain_forms_a_world_without_the_leaver() -> None:
    async with job(replace(QUICK, last_call_s=3.0), world="abcd") as one:
        await one.tell(leaving="b")
        one.torchruns["a"].kill()
        assert await one.world("cd") == 1
        # The leaver stops its workers as well, and is parked: it may not train on in a lost world.
        assert times_formed_again(one) == {"a": 0, "b": 1, "c": 1, "d": 1}
        await one.tell(granted="b")
        await one.passed(1.5)
        assert times_formed_again(one) == {"a": 0, "b": 1, "c": 1, "d": 1}


async def test_a_leaver_that_asks_is_parked_until_its_drain_is_cancelled() -> None:
    async with job(PATIENT, world="abc") as one:
        leaver = one.torchruns["b"]
        await one.tell(leaving="b")
        began = now()
        leaver.order("rejoin")
        assert await one.world("ac") == 1
        await one.passed(1.5)
        assert leaver.compare_sets(began) <= 3
        assert (len(leaver.worlds), leaver.failure) == (1, None)
        await one.tell()
        assert await one.world("abc") == 2


async def test_a_newcomer_cuts_no_commit_short_and_is_then_let_in_once() -> None:
    async with job(PATIENT, world="ab") as one:
        await one.tell(joins_wait=True)
        newcomer = await one.node("c")
        one.sidecars["c"].joins_wait = True
        await one.until(lambda: newcomer.compare_sets() >= 2)
        await one.passed(2)
        assert times_formed_again(one) == {"a": 0, "b": 0, "c": 0}
        await one.tell()
        assert await one.world("abc") == 1
        assert times_formed_again(one) == {"a": 1, "b": 1, "c": 0}


async def test_a_leave_and_a_replacement_are_one_new_round() -> None:
    async with job(PATIENT, world="abc") as one:
        await one.tell(leaving="b", joins_wait=True)
        replacement = await one.node("d")
        one.sidecars["d"].joins_wait = True
        await one.until(lambda: replacement.compare_sets() >= 2)
        await one.passed(1.5)
        assert times_formed_again(one) == {"a": 0, "b": 0, "c": 0, "d": 0}
        await one.tell(granted="b")
        assert await one.world("acd") == 1
        assert times_formed_again(one) == {"a": 1, "b": 0, "c": 1, "d": 0}


async def test_who_is_finishing_is_left_in_peace() -> None:
    async with job(QUICK, world="abc") as one:
        await one.tell(leaving="b")
        await one.torchruns["a"].wire.barrier()
        await one.tell(granted="b")
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
        await one.torchruns["a"].wire.barrier()
        await one.tell(granted="ab")
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
        await one.tell(leaving="b")
        one.torchruns["b"].order("finish")
        await one.until(lambda: one.torchruns["b"].ended)
        await one.until(lambda: one.sidecars["a"].rendezvous.round.closed == "success")
        assert [torchrun.failure for torchrun in one.everyone] == [None, None]


async def test_a_leaver_that_finishes_before_the_others_closes_nothing() -> None:
    async with job(PATIENT, world="ab") as one:
        await one.tell(leaving="a")
        await finishes_before_the_others(one, "a")
        await one.passed(1)
        assert one.sidecars["b"].rendezvous.round.closed == ""
        one.torchruns["b"].order("finish")
        await one.until(lambda: one.sidecars["b"].rendezvous.round.closed == "success")


@pytest.mark.parametrize("granted", [False, True])
async def test_a_leaver_that_closes_the_rendezvous_closes_nothing(granted: bool) -> None:
    """As torch 2.3 to 2.7 does at SIGTERM, and any torch whose workers failed for good."""
    async with job(PATIENT, world="abc") as one:
        await one.tell(leaving="b")
        if granted:
            await one.tell(granted="b")
            assert await one.world("ac") == 1
        leaver = one.torchruns["b"]
        leaver.order("fail")
        await one.until(lambda: leaver.ended)
        assert await one.world("ac") == 1
        await one.passed(1)
        assert leaver.failure is None
        assert one.sidecars["a"].rendezvous.round.closed == ""
        assert times_formed_again(one) == {"a": 1, "b": 0, "c": 1}
