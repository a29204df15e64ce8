# SPDX-License-Identifier: Apache-2.0
"""What torch's own handlers do with the views, and what becomes of them: no mock of torch."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

pytest.importorskip("torch.distributed", reason="the handlers are torch's")

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousTimeoutError,
)

from launcher_shim.c10d.rounds.records import Round
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.clocks.virtual import now
from tests.support.sidecars.jobs import KEYS, begin_next_life
from tests.support.sidecars.rendezvous import QUICK, Job, Torchrun, job

pytestmark = pytest.mark.virtual

NOWHERE = 1
"""The port at which somebody looks in vain for a first rank that will never be there."""

PATIENT = replace(QUICK, last_call_s=20.0)
"""For counting rounds where everybody comes."""


async def test_everyone_at_once_is_one_round_with_one_compare_and_set_each() -> None:
    names = "abcdefgh"
    async with job(replace(PATIENT, max_nodes=8, first_call_s=20)) as one:
        await one.all_of(names)
        began = now()
        assert await one.world(names) == 0
        assert now() - began < 15, "no torchrun waits for the last call to end"
        # One more makes torch's sentinel when the client is made.
        assert {t.compare_sets() for t in one.everyone} == {2}


async def test_a_joiner_is_let_in_and_everyone_gets_the_same_world() -> None:
    async with job(PATIENT, world="ab") as one:
        began = now()
        await one.node("c")
        assert await one.world("abc") == 1
        # Exit, join and at most one promotion; torch sends no more than it must.
        assert all(one.torchruns[name].compare_sets(began) <= 3 for name in "ab")


async def test_a_torchrun_with_the_same_address_pid_and_id_is_another_one() -> None:
    twin = ("10.0.0.1", 42, 0)
    async with job(QUICK) as one:
        for name in "abc":
            await one.sidecar(name)
            one.torchrun(name, node=twin)
        first = await one.world("abc")
        one.torchruns["b"].kill()
        await one.until(lambda: one.torchruns["b"].ended)
        one.torchrun("b", node=twin)
        assert await one.world("abc") > first
        assert len(one.torchruns["b"].worlds) == 1


async def test_one_more_than_the_maximum_is_parked_and_outlives_its_join_time_out() -> None:
    async with job(replace(QUICK, max_nodes=2), ttl_s=1.0, world="ab") as one:
        spare = await one.node("c", join_s=1)
        began = await one.passed(3)
        assert spare.compare_sets(began) <= 3
        assert spare.failure is None
        one.torchruns["b"].kill()
        await one.stop_sidecar("b")
        await one.world("ac")


async def test_one_that_was_parked_for_long_has_all_its_time_to_join_again() -> None:
    async with job(replace(QUICK, max_nodes=2), ttl_s=1.0, world="ab") as one:
        spare = await one.node("c", join_s=3)
        # One makes torch's sentinel; when it has sent another, its time to join runs.
        await one.until(lambda: spare.compare_sets() >= 2)
        await one.passed(3.5)
        spare.give_time(30)
        for name in "ab":
            one.torchruns[name].kill()
        await one.stop_sidecar("b")
        await one.passed(3.5)
        assert spare.failure is None
        one.torchrun("a")
        await one.world("ac")


async def test_a_launcher_with_another_maximum_does_not_spin() -> None:
    async with job(replace(QUICK, max_nodes=2), world="ab") as one:
        for name in "cd":
            await one.sidecar(name)
        one.torchrun("c", max_nodes=3)
        one.torchrun("d", max_nodes=1)
        began = await one.passed(4)
        assert one.torchruns["c"].compare_sets(began) <= 8
        assert one.torchruns["d"].compare_sets(began) <= 8
        assert [t.restarts for t in one.everyone] == [0, 0, 0, 0]


async def test_a_hung_torchrun_is_given_up_and_comes_back_when_it_wakes() -> None:
    async with job(replace(QUICK, hung_s=2.5), world="abc") as one:
        one.torchruns["b"].awake.clear()
        await one.world("ac")
        one.torchruns["b"].awake.set()
        await one.world("abc")


async def test_one_that_cannot_stop_its_workers_is_left_behind_and_let_in_when_it_can() -> None:
    async with job(replace(QUICK, leave_s=1.5), world="abcd") as one:
        stuck = one.torchruns["c"]
        stuck.can_stop.clear()
        one.torchruns["d"].kill()
        await one.world("ab")
        assert (stuck.failure, len(stuck.worlds)) == (None, 1)
        stuck.can_stop.set()
        await one.world("abc")
        assert (stuck.restarts, len(stuck.worlds)) == (1, 2)


async def test_one_that_is_slow_to_stop_its_workers_is_waited_for() -> None:
    async with job(replace(PATIENT, leave_s=60.0), world="abcd") as one:
        slow = one.torchruns["c"]
        slow.can_stop.clear()
        one.torchruns["d"].kill()
        await one.until(lambda: slow.restarts == 1)
        await one.passed(2.0)
        assert [one.torchruns[name].world for name in "ab"] == [
            one.torchruns[name].worlds[0] for name in "ab"
        ]
        slow.can_stop.set()
        one.torchrun("d")
        assert await one.world("abcd") == 1


async def test_closed_by_success_stays_closed() -> None:
    async with job(QUICK, world="ab") as one:
        for torchrun in one.everyone:
            torchrun.order("finish")
        await one.until(lambda: all(t.ended for t in one.everyone))
        assert [t.failure for t in one.everyone] == [None, None]
        rendezvous = one.sidecars["a"].rendezvous
        await one.until(lambda: rendezvous.round.closed == "success")
        late = await one.node("c")
        await one.until(lambda: late.ended)
        assert isinstance(late.failure, RendezvousClosedError)


async def test_nobody_is_let_in_while_one_stands_in_the_exit_barrier() -> None:
    async with job(QUICK, world="ab") as one:
        await one.torchruns["a"].comes_to_the_exit_barrier()
        late = await one.node("c")
        await one.passed(2.5)
        assert one.torchruns["b"].restarts == 0
        assert late.worlds == []


async def test_a_waiter_that_times_out_does_not_close_a_running_job() -> None:
    async with job(replace(QUICK, max_nodes=3), world="abc") as one:
        # Its own maximum is larger: it waits in the wait list, where torch's time-out counts.
        late = await one.node("d", max_nodes=4, join_s=1)
        await one.until(lambda: late.ended)
        assert isinstance(late.failure, RendezvousTimeoutError)
        late = one.torchrun("d", max_nodes=4)
        await one.until(lambda: late.compare_sets() > 2)
        late.shut_down()
        await one.passed(1)
        assert one.sidecars["a"].rendezvous.round.closed == ""
        assert [one.torchruns[name].restarts for name in "abc"] == [0, 0, 0]


async def test_an_agent_that_fails_leaves_the_job_to_the_others_while_they_are_enough() -> None:
    async with job(QUICK, world="abc") as one:
        one.torchruns["a"].order("fail")
        await one.world("bc")
        rounds: list[Round] = []
        rendezvous = one.sidecars["c"].rendezvous

        async def follow() -> None:
            while True:
                rounds.append(rendezvous.round)
                await rendezvous.news()

        following = asyncio.ensure_future(follow())
        one.torchruns["b"].order("fail")
        await one.until(lambda: any(seen.closed == "failure" for seen in rounds))
        following.cancel()


@pytest.mark.parametrize("spare", [False, True], ids=["it comes back", "a spare"])
async def test_closed_by_failure_the_others_leave_at_once_and_go_on(spare: bool) -> None:
    async with job(replace(QUICK, max_nodes=2), world="ab") as one:
        if spare:
            await one.node("c")
            await one.until(lambda: "c" in one.sidecars["a"].nodes)
        one.torchruns["a"].order("fail")
        if not spare:
            await one.until(lambda: one.torchruns["a"].ended)
            # Its world is lost: it stops its workers and asks, before anybody has come back.
            await one.until(lambda: one.torchruns["b"].restarts == 1)
            one.torchrun("a")
        assert await one.world("bc" if spare else "ab") == 1
        assert [t.failure for t in one.everyone] == [None, None, None]
        assert [one.torchruns["b"].restarts, one.everyone[-1].restarts] == [1, 0]


async def test_closed_by_failure_it_stays_so_until_somebody_asks() -> None:
    async with job(replace(QUICK, max_nodes=2), world="ab") as one:
        one.torchruns["b"].awake.clear()
        one.torchruns["a"].order("fail")
        rendezvous = one.sidecars["a"].rendezvous
        await one.until(lambda: rendezvous.round.closed == "failure")
        one.torchruns["b"].kill()
        await one.until(lambda: all(t.ended for t in one.everyone))
        await one.until(lambda: "no node asks" in rendezvous.reason)
        for name in "ab":
            one.torchrun(name)
        assert await one.world("ab") > 0


async def stands_in_the_exit_barrier(one: Job, name: str) -> None:
    one.torchruns[name].order("wait")

    def finished() -> bool:
        node = one.sidecars["c"].nodes[name]
        return node.finished and one.sidecars["c"].rendezvous.round.finishing

    await one.until(finished)


@pytest.mark.parametrize("how", ["rejoin", "fail", "kill"])
async def test_one_that_trains_leaves_at_once_what_fails_while_another_is_done(how: str) -> None:
    async with job(replace(QUICK, max_nodes=3), world="abc") as one:
        done, trains, fails = one.everyone
        await stands_in_the_exit_barrier(one, "a")
        if how == "kill":
            fails.kill()
        else:
            fails.order(how)
        await one.until(lambda: trains.restarts == 1)
        if how != "rejoin":
            await one.until(lambda: fails.ended)
            # Alone it is too few: who is done holds on, as natively.
            assert not done.ended
            one.torchrun("c")
        assert await one.world("bc") == 1
        await one.until(lambda: done.ended)
        assert (done.failure, len(done.worlds)) == (None, 1)
        await one.until(lambda: one.sidecars["b"].nodes["a"].state == "left")
        assert one.sidecars["b"].rendezvous.round.closed == ""
        assert [trains.failure, one.torchruns["c"].failure] == [None, None]


async def test_closed_by_failure_while_one_is_done_the_others_leave_and_go_on() -> None:
    async with job(replace(PATIENT, min_nodes=3, max_nodes=3), world="abc") as one:
        await stands_in_the_exit_barrier(one, "a")
        one.torchruns["c"].order("fail")
        await one.until(lambda: one.torchruns["b"].restarts == 1)
        assert one.sidecars["b"].rendezvous.round.closed == "failure"
        one.torchrun("c")
        await one.node("d")
        assert await one.world("bcd") == 1
        await one.until(lambda: one.everyone[0].ended)
        assert [t.failure for t in one.everyone] == [None] * 5


@pytest.mark.parametrize("lost", [False, True], ids=["still trains", "is told to form again"])
async def test_one_that_is_done_does_not_close_what_another_one_goes_on_with(lost: bool) -> None:
    async with job(replace(QUICK, max_nodes=3), world="abc") as one:
        done, trains, fails = one.everyone
        await stands_in_the_exit_barrier(one, "a")
        if lost:
            trains.can_stop.clear()
            fails.kill()
            await one.until(lambda: trains.restarts == 1)
        # Its time in the exit barrier is over before the other one has stopped its workers.
        one.end_time_in_exit_barrier()
        await one.until(lambda: done.ended)
        assert one.sidecars["b"].rendezvous.round.closed == ""
        trains.can_stop.set()
        if not lost:
            fails.order("fail")
            await one.until(lambda: trains.restarts == 1)
            await one.until(lambda: fails.ended)
        one.torchrun("c")
        assert await one.world("bc") == 1
        assert one.sidecars["b"].rendezvous.round.closed == ""
        assert [done.failure, trains.failure] == [None, None]


async def test_one_that_is_done_does_not_close_what_the_others_go_on_with() -> None:
    async with job(PATIENT, world="ab") as one:
        one.torchruns["b"].order("rejoin")
        rendezvous = one.sidecars["a"].rendezvous
        one.torchruns["a"].awake.clear()
        await one.until(lambda: rendezvous.snapshot().nodes["b"].ask == 2)
        # Its own time in the exit barrier is over.
        one.torchruns["a"].order("finish")
        one.torchruns["a"].awake.set()
        await one.until(lambda: one.torchruns["a"].ended)
        one.torchrun("a")
        assert await one.world("ab") == 1
        assert [t.failure for t in one.everyone] == [None, None, None]


async def test_i5_a_store_that_is_emptied_is_seeded_again() -> None:
    async with job(PATIENT, ttl_s=1.0, world="abc") as one:
        one.engine = fresh = MemoryEngine(now)
        for sidecar in one.sidecars.values():
            await sidecar.move(fresh)
        run = one.sidecars["a"].rendezvous
        await one.until(lambda: len(one.sidecars["a"].nodes) == 3 and run.round.mod_revision > 0)
        await one.until(lambda: run.snapshot().revision == fresh.revision)
        await one.passed(4)
        assert [torchrun.restarts for torchrun in one.everyone] == [0, 0, 0]
        await one.node("d")
        assert await one.world("abcd") == 1


async def a_silent_first_rank(one: Job) -> tuple[Torchrun, Torchrun]:
    """One has its place as rank 0 and does not say where; the other one waits for that."""
    for name in "ab":
        await one.sidecar(name)
    silent, waiting = one.torchrun("a"), one.torchrun("b")
    silent.line.stores.clear()
    seen = one.sidecars["b"]
    await one.until(lambda: [node.state for node in seen.nodes.values()] == ["in", "in"])
    await one.passed(1)
    assert not waiting.worlds
    return silent, waiting


async def test_one_whose_first_rank_died_before_it_spoke_comes_back_to_form_again() -> None:
    async with job(QUICK) as one:
        silent, waiting = await a_silent_first_rank(one)
        silent.kill()
        await one.until(lambda: waiting.restarts == 1)
        # The sidecar's word: who is left waiting gets an error of torch's.
        assert (waiting.worlds[0].rank, waiting.worlds[0].master_port) == (1, NOWHERE)


async def begins_its_next_life(one: Job) -> None:
    seen = one.sidecars["a"].pod.client.membership.snapshot().job
    assert seen is not None
    await begin_next_life(MemoryStore(one.engine), KEYS, seen)


async def test_i1_torchruns_of_a_former_life_leave_its_world_and_form_one_in_the_next() -> None:
    async with job(PATIENT, world="ab") as one:
        await begins_its_next_life(one)
        await one.until(lambda: [len(torchrun.worlds) for torchrun in one.everyone] == [2, 2])
        await one.world("ab")
        assert {sidecar.pod.registrar.generation for sidecar in one.sidecars.values()} == {2}


async def test_i1_one_that_waits_for_its_former_world_is_let_go_and_gets_nothing_of_the_next() -> (
    None
):
    async with job(PATIENT) as one:
        silent, waiting = await a_silent_first_rank(one)
        await begins_its_next_life(one)
        await one.until(lambda: bool(waiting.worlds))
        assert (waiting.worlds[0].rank, waiting.worlds[0].master_port) == (1, NOWHERE)
        silent.line.stores.set()
        await one.until(lambda: [len(torchrun.worlds) for torchrun in one.everyone] == [2, 2])
        await one.world("ab")
        first, second = silent.worlds[1], waiting.worlds[1]
        assert first.master_port == second.master_port != NOWHERE
