# SPDX-License-Identifier: Apache-2.0
"""Members that watch each other: whose machine is gone is evicted before its lease ends, no other.

That two at least have to say so, of one that reaches neither them nor the store, is looked at (I5).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rdzv.peers import Unreached
from tests.simulation.nodes import LEASE_TTL_S
from tests.world.world import HERE, Job, World

SHORT_S = 0.8 * LEASE_TTL_S
"""A lease that was renewed just before lives for longer."""
LONG_S = 60.0
MACHINES = {"machines": True}


def members(job: Job) -> str:
    return "".join(sorted(job.snapshot.members))


def lost(job: Job) -> list[str]:
    """Who was evicted before a lease ended."""
    return [entry.member for entry in job.history("lost") if entry.details.get("early")]


async def test_machines_that_are_gone_are_evicted_before_their_leases_end(world: World) -> None:
    job = await world.job("abcdef", plot=MACHINES)
    await job.trains(10)
    for name in "bc":
        job[name].lose()
    await job.until(lambda: members(job) == "adef", SHORT_S)
    assert sorted(lost(job)) == ["b", "c"]
    await job.settles()
    assert job.world == "adef"
    assert not job.invariants.truth.under(HERE.suspicions)


async def test_i6_one_that_was_evicted_and_lives_comes_back(world: World) -> None:
    job = await world.job("abcd", plot=MACHINES)
    await job.trains()
    job["c"].part("abd")
    job["c"].cut()
    await job.until(lambda: members(job) == "abd", SHORT_S)
    await job.passes(LONG_S)
    job["c"].meet("abd")
    job["c"].mend()
    await job.settles()
    assert (job.world, lost(job)) == ("abcd", ["c"])


def reaches_the_store(job: Job) -> None:
    job["c"].part("abd")


def is_reached_by_others(job: Job) -> None:
    job["c"].part("a")
    job["c"].cut()


def the_store_is_away_for_all(job: Job) -> None:
    job["c"].part("abd")
    job.cut()


def its_lines_break_and_are_back(job: Job) -> None:
    job["c"].part("abd", silent=False)
    job["c"].cut()


def only_its_sidecar_is_away(job: Job) -> None:
    job["c"].crash()


@pytest.mark.parametrize(
    "happens",
    [
        reaches_the_store,
        is_reached_by_others,
        the_store_is_away_for_all,
        its_lines_break_and_are_back,
        only_its_sidecar_is_away,
    ],
)
async def test_i5_nobody_else_is_evicted(world: World, happens: Callable[[Job], None]) -> None:
    job = await world.job("abcd", plot=MACHINES)
    await job.trains()
    happens(job)
    await job.passes(LONG_S)
    assert lost(job) == []
    for pod in job.pods.values():
        pod.meet("".join(job.pods).replace(pod.name, ""))
        if pod.sidecar is None:
            pod.start()
    job.mend()
    await job.settles()
    assert not job.invariants.truth.under(HERE.suspicions)
    assert (job.world, lost(job)) == ("abcd", [])


async def test_i5_in_a_job_of_two_nobody_is_evicted(world: World) -> None:
    job = await world.job("ab", plot=MACHINES)
    await job.trains()
    job["b"].lose()
    await job.passes(SHORT_S / 2)
    assert members(job) == "ab"
    await job.passes(LONG_S)
    assert lost(job) == []


async def test_nobody_is_evicted_while_a_world_ends_well(world: World) -> None:
    """Its last work would be cut off for one that may have finished."""
    job = await world.job("abcd", plot=MACHINES)
    await job.trains()
    job.last_step, job.invariants.rounds.may_close = job.step + 3, True
    job.uploads_s = dict.fromkeys("abcd", 60.0)
    job.invariants.rounds.at_finish = lambda round: job["c"].lose()
    await job.until(lambda: job["c"].gone)
    await job.passes(LONG_S)
    assert lost(job) == []


async def test_neighbours_that_were_never_reached_are_on_record_and_not_suspected(
    world: World,
) -> None:
    """A NetworkPolicy may close the port from the start."""
    job = await world.job("", plot=MACHINES)
    for name in "abc":
        job.add(name).part("abc".replace(name, "")[: "abc".index(name)])
    await job.passes(2 * LONG_S)
    unreached = map(Unreached.from_kv, job.invariants.truth.under(HERE.unreached))
    assert {one.members for one in unreached} == {("b", "c"), ("a", "c"), ("a", "b")}
    assert not job.invariants.truth.under(HERE.suspicions)
    for name in "abc":
        job[name].meet("abc".replace(name, ""))
    await job.passes(LONG_S)
    assert not job.invariants.truth.under(HERE.unreached)
