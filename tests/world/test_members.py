# SPDX-License-Identifier: Apache-2.0
"""Who is a member and by which template: takeovers, deleted Jobs, roll-outs, lives, other runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.nodes import LEASE_TTL_S
from tests.simulation.other_runs import FRESH
from tests.simulation.torchrun import RUN
from tests.world.world import Job, World

WITHOUT_TORCHRUN = {"trains": False}
LONG_S = 60.0


def most(job: Job) -> int:
    stored = job.snapshot.job
    return stored.policy.max_nodes if stored is not None else 0


def roll_out(job: Job, max_nodes: int) -> None:
    """Let pods come with another template from now on."""
    job.template = replace(job.template, most=max_nodes)
    job.go_by(job.template)


async def test_a_roll_out_changes_the_bounds_refuses_nobody_and_is_taken_back(
    world: World,
) -> None:
    job = await world.job("a", most=4, plot=WITHOUT_TORCHRUN)
    former = job.template
    roll_out(job, 8)
    job.add("new")
    await job.until(lambda: most(job) == 8)
    job.template = former
    job.add("b")
    await job.passes(LONG_S)
    assert (most(job), len(job.snapshot.members)) == (8, 3)
    roll_out(job, 4)
    job["new"].sigterm(grace_s=10)
    await job.until(lambda: most(job) == 4)
    await job.settles()
    why = "no member with the newer template is left: max is 4 (before: 8)"
    assert [entry.why for entry in job.history("set")][1:] == [why]


@pytest.mark.parametrize("what", ["its lease is lost", "another one comes"])
async def test_who_comes_back_in_time_keeps_the_newer_template_in_force(
    world: World, what: str
) -> None:
    job = await world.job("a", most=4, plot=WITHOUT_TORCHRUN)
    roll_out(job, 8)
    job.add("new")
    await job.until(lambda: most(job) == 8)
    if what == "its lease is lost":
        job["new"].cut()
        await job.until(lambda: "new" not in job.snapshot.members)
        job["new"].mend()
    else:
        job["new"].die()
        await job.until(lambda: "new" not in job.snapshot.members)
        job.add("new")
    await job.passes(10 * LEASE_TTL_S)
    assert (most(job), sorted(job.snapshot.members)) == (8, ["a", "new"])


async def test_a_late_pod_of_a_deleted_job_does_not_take_the_new_one_over(world: World) -> None:
    job = await world.job("ab")
    await job.trains()
    late = job.stray("late", "uid-deleted")
    await job.passes(5)
    late.die()
    await job.settles()
    assert (job.world, job.lost, job.formed) == ("ab", 0, ["ab"])


async def test_a_job_that_a_late_pod_took_over_comes_back_to_its_pods(world: World) -> None:
    job = await world.job("", plot=WITHOUT_TORCHRUN)
    late = job.stray("late", "uid-deleted")
    await job.until(lambda: "late" in job.snapshot.members)
    for name in "ab":
        job.add(name)
    await job.passes(5)
    late.die()
    await job.settles()
    assert sorted(job.snapshot.members) == ["a", "b"]


async def test_i6_the_old_pod_of_a_name_is_fenced_and_changes_nothing_more(world: World) -> None:
    job = await world.job("ab", plot=WITHOUT_TORCHRUN)
    old = job["a"]
    new = job.add("a")
    await job.until(lambda: job.snapshot.members["a"].pod_uid == new.pod_uid)
    await job.until(lambda: old.sidecar is not None and old.sidecar.fenced)
    await job.passes(LONG_S)
    assert job.snapshot.members["a"].pod_uid == new.pod_uid
    old.die()


async def test_i7_a_name_is_not_taken_over_from_a_pod_that_still_saves(world: World) -> None:
    job = await world.job("ab")
    await job.trains()
    old = job["a"]
    old.training.save_s = (5.0, 5.0)
    old.sigterm(grace_s=60)
    new = job.add("a")
    await job.until(lambda: old.gone)
    assert old.outcome == "committed"
    await job.settles()
    assert (job.world, job.lost) == ("ab", 0)
    assert job.snapshot.members["a"].pod_uid == new.pod_uid


async def test_the_last_one_to_leave_notes_it_and_the_next_life_begins_at_once(
    world: World,
) -> None:
    job = await world.job("abc", plot=WITHOUT_TORCHRUN, job_uid="")
    for name in "abc":
        job[name].sigterm(grace_s=10)
    await job.ends(*"abc")
    assert job.snapshot.job is not None
    assert job.snapshot.job.vacated
    job.add("a")
    await job.until(lambda: job.snapshot.members, LEASE_TTL_S / 2)
    assert job.snapshot.job.generation == 2


async def test_i5_a_restarted_sidecar_keeps_its_world_until_a_full_store_has_room(
    world: World,
) -> None:
    job = await world.job("abc")
    await job.trains()
    job.engine.fill(0)
    for name in "ab":
        job[name].restart()
    await job.passes(10 * LEASE_TTL_S)
    assert sorted(job.snapshot.members) == ["a", "b", "c"]
    job.engine.make_room()
    await job.settles()
    assert job.formed == ["abc"]


async def test_i11_a_world_trains_on_and_may_drain_beside_one_of_another_run(world: World) -> None:
    job = await world.job("abc")
    await job.trains()
    job["c"].end_container()
    await job.until(lambda: job.world == "ab")
    job["c"].run = FRESH
    job["c"].start_container()
    await job.until(lambda: any(run == FRESH for run, _ in job.invariants.rounds.frozen))
    await job.trains()
    lost = job.lost
    job["a"].sigterm(grace_s=60)
    await job.ends("a")
    assert job["a"].outcome == "committed"
    job["c"].end_container()
    job["c"].run = RUN
    job["c"].start_container()
    await job.settles()
    assert (job.world, job.lost) == ("bc", lost)


def hosts(job: Job, name: str) -> str:
    """The members on the host list of a pod."""
    lines = job[name].run_dir.hosts().splitlines()[:-1]
    return "".join(sorted(line.partition(".")[0] for line in lines))


async def a_spare_takes_over(world: World) -> Job:
    """Of three, two have a line; the oldest is away, and the third has its line."""
    job = await world.job("", most=2, plot=WITHOUT_TORCHRUN)
    for name in "abc":
        job.add(name)
        await job.passes(1)
    assert hosts(job, "b") == "ab"
    job["a"].cut()
    await job.until(lambda: hosts(job, "b") == "bc")
    return job


async def test_an_older_member_that_comes_back_takes_no_line_from_one_that_has_it(
    world: World,
) -> None:
    """Not either in the list of a sidecar that starts again."""
    job = await a_spare_takes_over(world)
    job["a"].mend()
    await job.until(lambda: "a" in job.snapshot.members)
    await job.passes(5)
    job["b"].restart()
    await job.passes(5)
    assert hosts(job, "b") == "bc"
    # Nor while the other one is away for a moment.
    job["c"].cut()
    await job.until(lambda: "c" not in job.snapshot.members)
    job["c"].mend()
    await job.until(lambda: "c" in job.snapshot.members)
    await job.until(lambda: hosts(job, "b") == "bc")
    job["c"].sigterm(grace_s=10)
    await job.ends("c")
    await job.settles()
    assert hosts(job, "b") == "ab"


async def test_i2_one_that_drained_and_was_lost_behind_a_cut_goes_at_once(world: World) -> None:
    job = await world.job("abc", plot=WITHOUT_TORCHRUN)
    await job.until(lambda: hosts(job, "b") == "abc")
    job["b"].cut()
    job["a"].sigterm(grace_s=5)
    await job.ends("a")
    job["b"].mend()
    await job.until(lambda: hosts(job, "b") == "bc", 2.0)


async def test_i4_a_sidecar_that_cannot_register_leaves_one_host_whoever_leaves(
    world: World,
) -> None:
    job = await world.job("abc", plot=WITHOUT_TORCHRUN)
    await job.until(lambda: hosts(job, "b") == "abc")
    job["b"].restart()
    assert job["b"].link is not None
    job["b"].link.refuse_leases(LONG_S)
    for name in "ac":
        job[name].sigterm(grace_s=5)
    await job.ends("a", "c")
    await job.passes(2 * LEASE_TTL_S)
    assert len(hosts(job, "b")) == 1
    await job.settles()
    assert hosts(job, "b") == "b"
