# SPDX-License-Identifier: Apache-2.0
"""A real torchrun job while its nodes come, go and die, in any part.

One job goes through all of it, with one and with two processes a node. Each test first brings it
back to three nodes (two of two processes) that step in one world, so each can run alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.support.training.job import FORM_TIMEOUT_S, Job, Node, marked
from tests.support.training.step_log import World
from tests.support.training.taken_ports import taken_ports

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

both = pytest.mark.parametrize("job", [1, 2], indirect=True, scope="module")
one_process = pytest.mark.parametrize("job", [1], indirect=True, scope="module")


@pytest.fixture(scope="module")
def job(
    request: pytest.FixtureRequest,
    run_job: Callable[..., AbstractContextManager[Job]],
    embedded: list[str],
) -> Iterator[Job]:
    slots = request.param
    with run_job(embedded, slots=slots, least=3 - slots, most=4) as job:
        yield job


@pytest.fixture(autouse=True)
def _one_world_at_a_time(job: Job) -> Iterator[None]:
    yield
    job.never_two_worlds()


def together(job: Job) -> World:
    """Bring the job back to where each test begins, whatever an earlier one has left."""
    size = 3 if job.slots == 1 else 2
    for node in tuple(job.nodes.values()):
        if node.launcher is None or node.sidecar is None or node.sidecar.poll() is not None:
            job.kill_node(node)
    while len(job.nodes) > size:
        job.stop_node(job.nodes[max(job.nodes)])
    for node in job.nodes.values():
        assert node.launcher is not None
        if node.launcher.poll() is not None:
            job.start_launcher(node)
    if len(job.nodes) < size:
        job.add(size - len(job.nodes))
    return job.world_of(job.nodes.values())


def node_of_rank(job: Job, world: World, rank: int) -> Node:
    return job.nodes[world.workers[rank].node]


def restarts_burnt(world: World, before: World) -> int:
    """Most restarts that torch has counted on one node between two worlds.

    One that dies makes the others' workers fail, which torch counts once, as it always does. One
    that joins mostly costs none; but an agent looks for waiters once a second, and where another
    has looked before it and stopped its workers, its own fail first.
    """
    then = {worker.node: worker.restarts for worker in before.workers.values()}
    return max(
        worker.restarts - then[worker.node]
        for worker in world.workers.values()
        if worker.node in then
    )


def hold_restarts(job: Job, world: World, before: World, most: int = 1) -> None:
    """Assert that torch has counted no more restarts than a change costs.

    Excused are those over a port that torch had chosen and somebody else was given, and one for
    each second for which the machine stood still, which ends leases.
    """
    taken = sum(taken_ports(node.launcher_log()) for node in job.nodes.values())
    still_s = job.stood_still_s(before.ended_s, world.began_s)
    assert restarts_burnt(world, before) <= most + taken + int(still_s)


@both
def test_a_node_joins(job: Job) -> None:
    world = together(job)
    job.add()
    grown = job.world_of(job.nodes.values())
    # Who is late for the round joins the next one.
    hold_restarts(job, grown, world, most=2)
    job.until(
        lambda: set(job.witness.sight.membership.members) == set(job.nodes), 60, "all are members"
    )


@both
def test_kill_9_of_the_rank_0_node(job: Job) -> None:
    world = together(job)
    job.kill_node(node_of_rank(job, world, 0))
    killed_s = time.monotonic()
    smaller = job.world_of(job.nodes.values())
    hold_restarts(job, smaller, world)
    rounds = job.witness.rounds
    number = rounds[-1][2].number
    formed_s = next(at_s for at_s, _, seen in rounds if seen.number == number and seen.complete)
    assert formed_s > killed_s
    # Nobody sat out a last call, as torch does alone.
    words = "nobody else is coming: complete"
    assert any(
        f"round {number}: " in line and words in line
        for node in job.nodes.values()
        for line in node.sidecar_log().splitlines()
    ), f"no sidecar has said of round {number} that {words}"


@one_process
def test_kill_9_of_another_node(job: Job) -> None:
    world = together(job)
    job.kill_node(node_of_rank(job, world, 2))
    hold_restarts(job, job.world_of(job.nodes.values()), world)


@one_process
def test_a_node_is_terminated(job: Job) -> None:
    world = together(job)
    job.stop_node(node_of_rank(job, world, 1))
    hold_restarts(job, job.world_of(job.nodes.values()), world)


@both
def test_kill_9_of_an_agent_with_its_workers_and_its_restart(job: Job) -> None:
    world = together(job)
    victim = node_of_rank(job, world, 0)
    job.kill_agent_with_workers(victim)
    survivors = [node for node in job.nodes.values() if node is not victim]
    smaller = job.world_of(survivors)
    hold_restarts(job, smaller, world)
    job.start_launcher(victim)
    hold_restarts(job, job.world_of(job.nodes.values()), smaller)


@both
def test_kill_9_of_an_agent_alone_ends_its_orphans(job: Job) -> None:
    world = together(job)
    victim = node_of_rank(job, world, 1)
    orphans = job.kill_agent_only(victim)
    assert len(orphans) >= job.slots
    job.until(lambda: not orphans & marked(job.token, victim.name), 30, "the orphans end")
    job.world_of([node for node in job.nodes.values() if node is not victim])


@one_process
def test_kill_9_of_the_launcher_and_its_restart_at_once(job: Job) -> None:
    world = together(job)
    victim = node_of_rank(job, world, 0)
    job.kill_agent_with_workers(victim)
    job.start_launcher(victim)
    again = job.world_of(job.nodes.values(), not_=world)
    # The others may form a world before the new torchrun asks, which then joins that one.
    hold_restarts(job, again, world, most=2)


@one_process
def test_below_min_nobody_trains_and_at_min_it_goes_on(job: Job) -> None:
    world = together(job)
    first, second, third = job.nodes.values()
    job.kill_node(second)
    job.kill_node(third)
    ended_s = time.monotonic()
    assert first.launcher is not None
    job.until(lambda: not job.round.complete, 30, "the round is over")
    job.until(lambda: time.monotonic() - ended_s > 15, 20, "some time has passed")
    assert job.steps.worlds()[-1] is world
    assert world.ended_s < ended_s + 1
    assert first.launcher.poll() is None
    job.add()
    hold_restarts(job, job.world_of(job.nodes.values()), world)


@one_process
def test_beyond_max_a_spare_stands_by_and_takes_over(job: Job) -> None:
    together(job)
    job.add()
    full = job.world_of(job.nodes.values())
    spare = job.add()[0]
    spared_s = time.monotonic()
    job.until(
        lambda: spare.name in job.witness.sight.nodes, FORM_TIMEOUT_S, "the spare's torchrun asks"
    )
    job.goes_on(full, steps=100, timeout_s=120)
    job.undisturbed(full, spared_s)
    assert spare.launcher is not None
    assert spare.launcher.poll() is None
    job.kill_node(node_of_rank(job, full, 0))
    taken = job.world_of(job.nodes.values())
    assert spare.name in taken.nodes
    hold_restarts(job, taken, full)


@both
def test_a_node_frozen_beyond_its_lease_is_left_out_and_comes_back(job: Job) -> None:
    world = together(job)
    victim = node_of_rank(job, world, 1)
    job.freeze(victim)
    frozen_s = time.monotonic()
    smaller = job.world_of([node for node in job.nodes.values() if node is not victim])
    assert time.monotonic() - frozen_s > job.lease_s / 2
    job.goes_on(smaller)
    job.resume(victim)
    job.world_of(job.nodes.values())


@one_process
def test_a_sidecar_frozen_beyond_its_lease_is_stale_and_comes_back(job: Job) -> None:
    world = together(job)
    victim = node_of_rank(job, world, 0)
    job.freeze_sidecar(victim)
    smaller = job.world_of([node for node in job.nodes.values() if node is not victim])
    before = job.witness.sight.membership.incarnations[victim.name]
    job.goes_on(smaller)
    job.resume(victim)
    job.world_of(job.nodes.values())
    job.until(
        lambda: job.witness.sight.membership.incarnations[victim.name].number > before.number,
        60,
        "it is registered again",
    )
    assert victim.launcher is not None
    assert victim.launcher.poll() is None


@one_process
def test_kill_9_of_a_sidecar_ends_its_torchrun_and_nothing_else(job: Job) -> None:
    # Without muster-run in between, torch's client sees its connection end, and never reconnects.
    world = together(job)
    victim = node_of_rank(job, world, 0)
    job.kill_sidecar(victim)
    assert victim.launcher is not None
    assert victim.launcher.wait(120) == 1
    smaller = job.world_of([node for node in job.nodes.values() if node is not victim])
    job.start_sidecar(victim)
    job.until_ready(victim)
    job.start_launcher(victim)
    again = job.world_of(job.nodes.values())
    hold_restarts(job, again, smaller)


@both
def test_i1_no_two_rounds_are_ever_live(job: Job) -> None:
    world = together(job)
    job.goes_on(world)
    assert len(job.steps.worlds()) > 1 or len(job.witness.rounds) >= 2
    job.never_two_worlds()
