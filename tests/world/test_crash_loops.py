# SPDX-License-Identifier: Apache-2.0
"""A pod whose torchrun dies again and again beside a world that trains."""

from __future__ import annotations

import pytest

from rdzv.records.quarantine import Quarantine, Terms
from rdzv.store import Delete
from tests.world.world import HERE, Job, World

FOR_LONG = Terms(steps=20, worlds=2, first_s=3600.0, longest_s=3600.0, trial_s=3600.0)
FOR_A_WHILE = Terms(steps=10, worlds=1, brief_s=3.0, first_s=10.0, longest_s=40.0)
TO_FORM_S = 60.0
"""In so long the others would have formed another world, for one that they wait for or let in."""


def record(job: Job, member: str) -> Quarantine | None:
    return job.snapshot.quarantines.get(member)


def told_of(job: Job, member: str) -> list[str]:
    entries = [*job.history("quarantine"), *job.history("admit")]
    entries.sort(key=lambda entry: entry.at_unix_s)
    return [entry.what for entry in entries if entry.member == member]


def deaths(job: Job, member: str) -> int:
    known = record(job, member)
    return 0 if known is None else known.deaths


async def dies(job: Job, member: str, count: int) -> None:
    """Let its torchrun die in a world of all three, once more, and be back soon."""
    await job.until(lambda: job.world == f"ab{member}")
    await job.passes(1)
    job[member].end_container()
    await job.until(lambda: deaths(job, member) == count)
    await job.until(lambda: job.world == "ab")
    job[member].start_container()


async def test_a_crash_loop_is_damped_until_somebody_lets_it_in(world: World) -> None:
    job = await world.job("abc", least=2, quarantine=FOR_LONG, patience_s=3600.0)
    await dies(job, "c", 1)
    await dies(job, "c", 2)
    formed = len(job.formed)
    for _ in range(3):
        job["c"].end_torchrun()
        await job.passes(TO_FORM_S)
    known = record(job, "c")
    assert known is not None
    assert (known.out, known.deaths, len(job.formed)) == (True, 2, formed)
    job["c"].restart()
    await job.passes(TO_FORM_S)
    assert len(job.formed) == formed
    job.put(Delete(HERE.quarantine("c")))
    await job.until(lambda: job.world == "abc")
    assert told_of(job, "c") == ["quarantine"]


@pytest.mark.parametrize("most", [3, 4], ids=["all are at their places", "a place is free"])
async def test_i11_a_crash_loop_is_tried_again_after_ever_longer_pauses(
    world: World, most: int
) -> None:
    job = await world.job("abc", least=2, most=most, quarantine=FOR_A_WHILE)
    for pauses in (1, 2, 3):
        await dies(job, "c", pauses if pauses == 1 else 2)
        known = record(job, "c")
        assert known is not None
        assert (known.out, known.pauses) == (True, pauses)
    await job.settles()
    assert job.world == "abc"
    await job.until(lambda: record(job, "c") is None)
    assert {*told_of(job, "c")} == {"quarantine", "admit"}


@pytest.mark.parametrize("world", [0], indirect=True)
async def test_i11_four_that_fail_alike_and_are_well_then_all_train_with_no_hand(
    world: World,
) -> None:
    job = await world.job("abcd", most=5, quarantine=FOR_A_WHILE, patience_s=600.0)
    job.launchers.update(dict.fromkeys("abcd", "failing"))
    await job.passes(200)
    await job.until(lambda: job.snapshot.quarantines)
    job.launchers.clear()
    job.add("e")
    await job.settles()
    await job.until(lambda: job.world == "abcde")
    await job.until(lambda: not job.snapshot.quarantines)


async def test_who_dies_after_progress_is_in_no_crash_loop(world: World) -> None:
    terms = Terms(steps=10, worlds=1, brief_s=3.0, first_s=3600.0, longest_s=3600.0)
    job = await world.job("abc", least=2, quarantine=terms)
    for _ in range(3):
        await job.until(lambda: job.world == "abc")
        await job.trains(15)
        job["c"].end_container()
        await job.until(lambda: job.world == "ab")
        job["c"].start_container()
    await job.until(lambda: job.world == "abc")
    assert record(job, "c") is None


async def test_who_is_quarantined_is_let_in_where_too_few_others_train(world: World) -> None:
    terms = Terms(steps=20, worlds=1, first_s=3600.0, longest_s=3600.0)
    job = await world.job("abc", least=2, quarantine=terms)
    await dies(job, "c", 1)
    await job.passes(10)
    job["b"].die()
    await job.until(lambda: job.world == "ac")


async def test_who_ends_the_run_where_no_other_could_go_on_has_died_before_the_others(
    world: World,
) -> None:
    job = await world.job("ab", least=2, most=2, quarantine=FOR_LONG)
    await job.until(lambda: job.world == "ab")
    job.add("c")
    await job.passes(5)
    job["b"].order("fail")
    await job.until(lambda: job.world == "ac")
    assert deaths(job, "b") == 1


async def test_a_torchrun_that_ends_in_a_drain_has_not_died(world: World) -> None:
    terms = Terms(steps=20, worlds=1, first_s=3600.0, longest_s=3600.0)
    job = await world.job("abc", least=2, quarantine=terms)
    await job.trains(2)
    job["c"].sigterm(grace_s=60)
    await job.ends("c")
    await job.until(lambda: job.world == "ab")
    assert record(job, "c") is None


async def test_of_two_who_die_at_once_one_is_the_first_and_the_other_does_not_count(
    world: World,
) -> None:
    job = await world.job("abc", least=1, quarantine=FOR_LONG)
    await job.until(lambda: job.world == "abc")
    await job.passes(1)
    job["a"].end_container()
    job["b"].end_container()
    await job.until(lambda: job.world == "c")
    assert sorted(deaths(job, name) for name in "ab") == [0, 1]
