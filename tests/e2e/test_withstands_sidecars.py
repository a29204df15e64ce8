# SPDX-License-Identifier: Apache-2.0
"""A real torchrun job under ``muster-run`` while its sidecars die, freeze and are replaced."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.support.training.job import FORM_TIMEOUT_S, Job, Node
from tests.support.training.step_log import World

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

RunJob = Callable[..., AbstractContextManager[Job]]


@pytest.fixture(scope="module")
def job(run_job: RunJob, embedded: list[str]) -> Iterator[Job]:
    """Three nodes, with a lease that a sidecar is back within, however busy the machine."""
    with run_job(embedded, least=2, most=4, lease_s=120.0, wrapped=True) as job:
        yield job


@pytest.fixture(autouse=True)
def _one_world_at_a_time(job: Job) -> Iterator[None]:
    yield
    job.never_two_worlds()


def together(job: Job) -> World:
    if len(job.nodes) < 3:
        job.add(3 - len(job.nodes))
    return job.world_of(job.nodes.values())


def start_again(job: Job, node: Node) -> None:
    job.start_sidecar(node)
    job.until_ready(node)


def unnoticed(job: Job, world: World, since_s: float) -> None:
    """No other world, no restart, no other process, no pause beyond what a busy machine does."""
    job.goes_on(world, 40)
    job.until(
        lambda: {n.metric("muster_c10d_connections") for n in job.nodes.values()} == {1},
        60,
        "each torchrun is connected to its sidecar",
    )
    job.undisturbed(world, since_s)
    assert len(job.round.frozen) == len(job.nodes)
    assert all(
        node.launcher is not None and node.launcher.poll() is None for node in job.nodes.values()
    )


def test_kill_9_of_each_sidecar_is_not_noticed(job: Job) -> None:
    world, since_s = together(job), time.monotonic()
    for node in job.nodes.values():
        job.kill_sidecar(node)
        start_again(job, node)
    unnoticed(job, world, since_s)


def test_kill_9_of_all_sidecars_at_once_is_not_noticed(job: Job) -> None:
    world, since_s = together(job), time.monotonic()
    for node in job.nodes.values():
        job.kill_sidecar(node)
    for node in job.nodes.values():
        job.start_sidecar(node)
    job.until_ready(*job.nodes.values())
    unnoticed(job, world, since_s)


@pytest.mark.long
def test_a_sidecar_that_is_replaced_in_place_is_not_noticed(job: Job) -> None:
    world, since_s = together(job), time.monotonic()
    for node in job.nodes.values():
        job.stop_sidecar(node)
        start_again(job, node)
    unnoticed(job, world, since_s)


@pytest.mark.long
def test_the_world_grows_and_shrinks_as_ever_after_its_sidecars_were_replaced(job: Job) -> None:
    world = together(job)
    for node in tuple(job.nodes.values())[:2]:
        job.kill_sidecar(node)
        start_again(job, node)
    (fourth,) = job.add()
    job.world_of(job.nodes.values())
    job.kill_node(fourth)
    again = job.world_of(job.nodes.values(), job.lease_s + FORM_TIMEOUT_S)
    assert again is not world
    assert again.pids.isdisjoint(world.pids)
    assert all(n.launcher is not None and n.launcher.poll() is None for n in job.nodes.values())


def test_a_torchrun_whose_sidecar_was_away_beyond_the_lease_comes_back(
    run_job: RunJob, embedded: list[str]
) -> None:
    with run_job(embedded, least=2, most=4, lease_s=10.0, wrapped=True) as job:
        together(job)
        victim = job.nodes[max(job.nodes)]
        job.kill_sidecar(victim)
        smaller = job.world_of([node for node in job.nodes.values() if node is not victim])
        job.goes_on(smaller)
        start_again(job, victim)
        job.world_of(job.nodes.values())
        assert victim.launcher is not None
        assert victim.launcher.poll() is None
        job.never_two_worlds()


@pytest.mark.long
def test_a_sidecar_that_freezes_for_20_s_is_not_noticed(
    run_job: RunJob, embedded: list[str]
) -> None:
    """With a lease that is longer: within a shorter one the pod counts as gone, as a dead one."""
    with run_job(embedded, least=2, most=2, lease_s=30.0, wrapped=True) as job:
        job.add(2)
        world, since_s = job.world_of(job.nodes.values()), time.monotonic()
        victim = job.nodes[max(job.nodes)]
        job.freeze_sidecar(victim)
        job.until(lambda: time.monotonic() - since_s > 20, 30, "20 s pass")
        job.undisturbed(world, since_s)
        job.resume(victim)
        unnoticed(job, world, since_s)


@pytest.mark.long
def test_worlds_form_while_sidecars_die(run_job: RunJob, embedded: list[str]) -> None:
    with run_job(embedded, least=2, most=3, lease_s=30.0, wrapped=True) as job:
        nodes = job.add(3)
        chance = random.Random(5)
        for _ in range(6):
            node = chance.choice(nodes)
            job.kill_sidecar(node)
            start_again(job, node)
        world = job.world_of(nodes)
        assert world.restarts == 0
        job.never_two_worlds()


def test_the_end_of_training_is_told_by_a_sidecar_that_was_replaced(
    run_job: RunJob, embedded: list[str]
) -> None:
    with run_job(embedded, least=2, most=2, lease_s=30.0, wrapped=True) as job:
        nodes = job.add(2)
        job.world_of(nodes)
        job.kill_sidecar(nodes[0])
        start_again(job, nodes[0])
        job.stop_training()
        launchers = [node.launcher for node in nodes if node.launcher is not None]
        job.until(lambda: all(p.poll() is not None for p in launchers), 120, "every torchrun ends")
        assert [p.returncode for p in launchers] == [0, 0]
        job.until(lambda: job.round.closed == "success", 60, "it is closed by success")
