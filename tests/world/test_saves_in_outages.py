# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait for a save while the store takes no writes, or is away: they train on."""

from __future__ import annotations

import asyncio

import pytest

from agent.drain.gate_writer import CUT_S, PROBE_S
from rdzv.drain.gate import ON_CUT_S
from rdzv.store import Operation
from tests.simulation.nodes import LEASE_TTL_S
from tests.world.world import HERE, Job, World

LATEST_S = CUT_S + 3 * PROBE_S
"""By then ranks train on: a write that is not answered may take some seconds to be given up."""
LONG_S = 600.0


async def trains_on(job: Job, *, within_s: float = LATEST_S) -> None:
    async with asyncio.timeout(within_s):
        await job.trains(3)


async def refused_from(phase: str, job: Job) -> None:
    """Drain b; from one phase on the store takes no writes."""
    job["b"].drained(600)
    await job.phase(phase)
    job.refuse_writes()
    await job.stands()


@pytest.mark.parametrize("phase", ["hold", "commit", "done"])
async def test_ranks_train_on_and_the_drain_is_seen_through_once_the_store_takes_writes(
    world: World, phase: str
) -> None:
    # In done b is held below min, and nobody may write that.
    job = await world.job("ab", least=2 if phase == "done" else 1)
    await job.trains()
    await refused_from(phase, job)
    await trains_on(job)
    await trains_on(job, within_s=5)
    job.take_writes()
    if phase == "done":
        job.add("c")
    await job.ends("b")
    assert job["b"].outcome == "committed"
    await job.settles()


@pytest.mark.parametrize("cut", [False, True], ids=["it is read", "nor is it read"])
async def test_a_sidecar_that_starts_again_stops_no_rank_that_has_given_up(
    world: World, cut: bool
) -> None:
    job = await world.job("ab")
    await job.trains()
    await refused_from("commit", job)
    await trains_on(job)
    (epoch,) = {commit.epoch for commit in job.commits if commit.phase == "commit"}
    for name in "ab":
        if cut:
            job[name].cut()
        job[name].restart()
        job[name].refuse_writes()
    await trains_on(job, within_s=10)
    for name in "ab":
        job[name].mend()
        job[name].take_writes()
    await job.ends("b")
    assert job["b"].outcome == "committed"
    done = {commit.epoch for commit in job.commits if commit.phase == "done"}
    assert epoch not in done, "what was given up counts for no rank"


async def test_a_sidecar_that_starts_without_the_store_lets_ranks_train_on(world: World) -> None:
    job = await world.job("ab")
    await job.trains()
    await refused_from("commit", job)
    for name in "ab":
        job[name].cut()
        job[name].restart()
    await trains_on(job)


async def test_a_slow_save_of_others_parks_a_rank_for_as_long_as_it_takes(world: World) -> None:
    job = await world.job("ab", patience_s=LONG_S)
    await job.trains()
    job["a"].training.save_s = (4 * CUT_S, 4 * CUT_S)
    job["b"].drained(900)
    await job.ends("b")
    assert (job["b"].outcome, job.commit.epoch, job.lost) == ("committed", 1, 0)


async def test_a_probe_writes_nothing_and_only_while_ranks_wait(world: World) -> None:
    job = await world.job("ab", least=2)
    await job.trains()
    probes: list[float] = []

    def count(operations: object) -> None:
        assert isinstance(operations, list | tuple)
        if any(isinstance(o, Operation) and "/doctor/" in o.key for o in operations):
            probes.append(job.loop.time())

    for name in "ab":
        link = job[name].link
        assert link is not None
        link.on_txn = count
    await job.passes(10 * PROBE_S)
    assert probes == []
    job["b"].drained(600)
    await job.phase("done")
    await job.passes(4 * PROBE_S)
    assert job.commit.phase == "done"
    assert 2 * 3 <= len(probes) <= 2 * 5
    assert not any("/doctor/" in line for _, _, line in job.timeline.lines)


@pytest.mark.parametrize("world", [0], indirect=True)
async def test_i5_ranks_wait_for_a_lease_and_train_on_with_it(world: World) -> None:
    job = await world.job("ab", on_cut="hold")
    await job.trains()
    job.cut()
    await job.passes(ON_CUT_S)
    assert job["a"].gate == "idle", "its lease has not been gone for that long"
    await job.passes(LEASE_TTL_S + 5.0)
    made = job.made
    await job.passes(LONG_S)
    assert (job["a"].gate, job.made) == ("hold", made)
    job.mend()
    await job.trains()
    assert job["a"].gate == "idle"


async def test_i1_a_sidecar_that_starts_in_a_cut_holds_its_ranks_as_well(world: World) -> None:
    job = await world.job("ab", on_cut="hold")
    await job.trains()
    job.cut()
    await job.passes(5.0)
    job["a"].restart()
    await job.passes(ON_CUT_S + 5.0)
    assert job["a"].gate == "hold"
    job["a"].restart()
    await job.passes(5.0)
    assert job["a"].gate == "hold", "the one before it held them"
    job.mend()
    await job.trains()


async def test_i5_without_it_ranks_train_on_for_as_long_as_the_store_is_away(world: World) -> None:
    job = await world.job("ab")
    await job.trains()
    number = job.round
    job.cut()
    await job.passes(LONG_S)
    await job.trains()
    job.mend()
    await job.settles()
    assert job.round == number


async def hangs_for_three_attempts(job: Job) -> None:
    """Break the disk of b, let c ask for a place, and wait until three votes were missed."""
    for name in "ab":
        job[name].training.saves_every = 0
    await job.trains()
    job["b"].run_dir.broken = True
    job.add("c")
    await job.until(lambda: job.commit.failures == 3)
    assert job.commit.mute == ("b",)


async def test_i10_a_disk_that_hung_for_three_attempts_costs_no_step(world: World) -> None:
    job = await world.job("ab")
    await hangs_for_three_attempts(job)
    job["b"].run_dir.broken = False
    await job.until(lambda: job.commit.admitted or job.commit.refused)
    assert (job.commit.admitted, job.commit.refused, job.commit.mute) == (True, False, ())
    await job.settles()
    assert (job.world, job.lost) == ("abc", 0)


@pytest.mark.parametrize("world", [0], indirect=True)
async def test_i11_a_disk_that_hangs_on_keeps_a_newcomer_out_for_ten_minutes(world: World) -> None:
    job = await world.job("ab", patience_s=LONG_S)
    await hangs_for_three_attempts(job)
    await job.until(lambda: job.commit.refused)
    assert job.commit.mute == ("b",)
    assert "newcomers join without a save" in job.commit.reason


async def test_all_ranks_save_on_a_full_disk(world: World) -> None:
    """The page of the gate is changed in place."""
    job = await world.job("abc")
    await job.trains()
    for name in "abc":
        job[name].run_dir.full = True
    job["b"].sigterm(grace_s=120)
    await job.ends("b")
    assert (job["b"].outcome, job.lost) == ("committed", 0)


async def test_a_commit_goes_first_and_periodic_saves_go_on_after_it(world: World) -> None:
    job = await world.job("abc")
    await job.until(lambda: job.last_commit is not None)
    job["b"].sigterm(grace_s=120)
    await job.ends("b")
    last = job.last_commit
    assert last is not None
    assert (last.periodic, last.epoch) == (False, 1)
    await job.until(lambda: job.last_commit is not None and job.last_commit.step > last.step)
    after = job.last_commit
    assert after is not None
    assert (after.periodic, after.epoch, after.round) == (True, 1, 1)


async def test_what_all_have_saved_is_where_the_next_world_begins(world: World) -> None:
    """``lost`` counts what was made after it."""
    job = await world.job("abc")
    await job.until(lambda: job.last_commit is not None and job.last_commit.step >= 6)
    last = job.last_commit
    assert last is not None
    assert (last.periodic, last.round, last.epoch, last.job_uid) == (True, 0, 0, "uid-digits")
    job["b"].die()
    await job.until(lambda: job.world == "ac")
    await job.settles()
    start = job["a"].start_step
    assert start is not None
    assert start >= last.step


async def test_a_save_that_one_rank_does_not_make_is_told_and_never_counts(world: World) -> None:
    job = await world.job("abc")
    job["c"].training.saves_every = 0
    await job.trains(40)
    assert job.last_commit is None
    assert {kv.key for kv in job.invariants.truth.under(HERE.saves)} == {
        HERE.pod_saves(name) for name in "ab"
    }


async def test_whoever_is_first_has_vanished_and_another_puts_it_on_record(world: World) -> None:
    job = await world.job("abc")
    for name in "abc":
        job[name].training.saves_every = 20
    await job.trains(1)
    job.when(lambda: all(20 in job[name].saved() for name in "abc"), job["a"].crash)
    await job.until(lambda: job.last_commit is not None and job.last_commit.step >= 20)
    job["a"].start()
    await job.settles()
