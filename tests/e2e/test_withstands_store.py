# SPDX-License-Identifier: Apache-2.0
"""A real torchrun job while its store, three real etcd members, fails in every way (I5).

Whatever happens to the store: no worker stops or restarts, the rendezvous is the one it was, and
afterwards the membership is right. Each test first brings the job back to three nodes that step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from rdzv.errors import StoreError
from rdzv.store.etcd.client import EtcdStore
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.training.background import Background
from tests.support.training.job import FORM_TIMEOUT_S, Job
from tests.support.training.step_log import World

pytestmark = [pytest.mark.torch, pytest.mark.etcd, pytest.mark.timeout(900)]

both = pytest.mark.parametrize("job", [1, 2], indirect=True, scope="module")
one_process = pytest.mark.parametrize("job", [1], indirect=True, scope="module")


@pytest.fixture(scope="module")
def cluster() -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def job(
    request: pytest.FixtureRequest,
    run_job: Callable[..., AbstractContextManager[Job]],
    cluster: EtcdCluster,
) -> Iterator[Job]:
    slots = request.param
    settings = {"slots": slots, "least": 2, "most": 4, "proxied": True}
    with run_job(cluster.endpoints, **settings) as job:
        job.add(3 if slots == 1 else 2)
        yield job


@pytest.fixture(autouse=True)
def _mended_afterwards(request: pytest.FixtureRequest, cluster: EtcdCluster) -> Iterator[None]:
    job: Job | None = request.getfixturevalue("job") if "job" in request.fixturenames else None
    yield
    cluster.restore()
    if job is not None:
        job.mend_store()
        job.never_two_worlds()


def all_together(job: Job) -> World:
    """Wait until all nodes step in one world and everybody agrees about it."""
    for node in job.nodes.values():
        assert node.launcher is not None
        if node.launcher.poll() is not None:
            job.start_launcher(node)
    world = job.world_of(job.nodes.values())
    job.until(job.in_agreement, 60, "everybody agrees")
    return world


@contextmanager
def nothing_happens(job: Job) -> Iterator[World]:
    """The job takes no notice of what is done in the block."""
    world = all_together(job)
    since_s, before = time.monotonic(), job.round
    yield world
    job.until(job.in_agreement, 60, "store, host lists and metrics agree again")
    job.goes_on(world, 40)
    job.undisturbed(world, since_s)
    after = job.round
    assert (after.number, after.frozen) == (before.number, before.frozen)


def time_passes(job: Job, world: World, seconds: float) -> None:
    """Let the job train for a while; it must go on all the time."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        job.goes_on(world, steps=5, timeout_s=20)


def leader(cluster: EtcdCluster, background: Background) -> int:
    """The member that leads; during an election none does, and one that is busy does not tell."""

    async def is_leader(endpoint: str) -> bool:
        store = EtcdStore([endpoint])
        try:
            status = await store.status()
        except StoreError:
            return False
        finally:
            await store.close()
        return status.member_id == status.leader_id

    deadline_s = time.monotonic() + 60
    while True:
        for number, endpoint in enumerate(cluster.endpoints):
            if background.run(is_leader(endpoint)):
                return number
        assert time.monotonic() < deadline_s, "no member of the store leads"
        time.sleep(0.2)


@one_process
def test_i5_the_leader_is_killed(job: Job, cluster: EtcdCluster, background: Background) -> None:
    with nothing_happens(job) as world:
        first = leader(cluster, background)
        job.tell(f"etcd: leader {first} killed")
        cluster.kill(first)
        time_passes(job, world, 2 * job.lease_s)
        cluster.restore()


@one_process
def test_i5_the_leader_is_frozen_for_14_s(
    job: Job, cluster: EtcdCluster, background: Background
) -> None:
    with nothing_happens(job) as world:
        first = leader(cluster, background)
        job.tell(f"etcd: leader {first} frozen")
        cluster.freeze(first)
        time_passes(job, world, 14)
        job.tell(f"etcd: {first} resumed")
        cluster.resume(first)
        time_passes(job, world, 3)


@one_process
@pytest.mark.parametrize("seconds", [15, pytest.param(60, marks=pytest.mark.long)])
def test_i5_all_members_are_down(job: Job, cluster: EtcdCluster, seconds: float) -> None:
    with nothing_happens(job) as world:
        job.tell("etcd: all members killed")
        for member in range(len(cluster)):
            cluster.kill(member)
        time_passes(job, world, seconds)
        job.tell("etcd: all members start")
        cluster.restore()


@both
def test_i5_everybody_is_cut_off_for_three_lease_times(job: Job) -> None:
    with nothing_happens(job) as world:
        job.cut_store(job.nodes.values())
        time_passes(job, world, 3 * job.lease_s)
        job.until(lambda: not job.witness.sight.membership.members, 60, "their leases end")
        assert all(node.hosts() == sorted(job.nodes) for node in job.nodes.values())
        assert all(node.ask("healthz")[0] == 200 for node in job.nodes.values())
        job.mend_store()


@one_process
@pytest.mark.parametrize("lease_times", [0.5, 3])
def test_i5_the_history_is_compacted_while_everybody_is_cut_off(
    job: Job, lease_times: float
) -> None:
    def write_and_compact() -> None:
        for number in range(50):
            revision = job.witness.put(f"{job.keys.prefix}drill", str(number).encode())
        job.witness.compact(revision)

    with nothing_happens(job) as world:
        job.cut_store(job.nodes.values(), reset=True)
        job.tell("etcd: history compacted")
        write_and_compact()
        time_passes(job, world, lease_times * job.lease_s)
        write_and_compact()
        job.mend_store()


@one_process
def test_a_node_cut_off_alone_is_left_out_and_comes_back(job: Job) -> None:
    world = all_together(job)
    lost = job.nodes[world.workers[0].node]
    job.cut_store([lost])
    smaller = job.world_of([node for node in job.nodes.values() if node is not lost])
    time_passes(job, smaller, 5)
    job.mend_store()
    job.world_of(job.nodes.values())
    job.until(job.in_agreement, 60, "everybody agrees")


@one_process
def test_i5_a_node_that_dies_during_an_outage_is_missed_after_it(
    job: Job, cluster: EtcdCluster
) -> None:
    world = all_together(job)
    victim = job.nodes[world.workers[1].node]
    for member in range(len(cluster)):
        cluster.kill(member)
    job.kill_node(victim)
    cluster.restore()
    job.world_of(job.nodes.values())
    job.add()
    job.world_of(job.nodes.values())
    job.until(job.in_agreement, 60, "everybody agrees")


def test_i1_newcomers_form_no_second_world_while_all_others_are_cut_off(
    run_job: Callable[..., AbstractContextManager[Job]], cluster: EtcdCluster
) -> None:
    with run_job(cluster.endpoints, least=2, most=4, proxied=True) as job:
        old = job.add(2, uid="the-job")
        world = all_together(job)
        since_s = time.monotonic()
        job.cut_store(old)
        job.until(lambda: not job.witness.sight.membership.members, 60, "their leases end")
        new = job.add(2, uid="the-job")
        names = {node.name for node in new}
        job.until(
            lambda: (
                {n for n, it in job.witness.sight.nodes.items() if it.state == "asking"} == names
            ),
            FORM_TIMEOUT_S,
            "the newcomers ask",
        )
        time_passes(job, world, 3 * job.lease_s)
        job.undisturbed(world, since_s)
        assert job.steps.worlds() == [world]
        job.mend_store()
        job.world_of(job.nodes.values())
        job.never_two_worlds()


def test_a_job_without_a_uid_comes_together_after_a_cut_that_began_its_next_life(
    run_job: Callable[..., AbstractContextManager[Job]], cluster: EtcdCluster
) -> None:
    # Newcomers that have watched an empty job for three lease times cannot know that somebody
    # still trains behind the cut: without a UID they begin the job's next life.
    with run_job(cluster.endpoints, least=2, most=4, proxied=True) as job:
        old = job.add(2)
        all_together(job)
        job.cut_store(old)
        job.until(lambda: not job.witness.sight.membership.members, 60, "their leases end")
        new = job.add(2)
        job.world_of(new)
        job.mend_store()
        job.world_of(job.nodes.values())
        job.until(job.in_agreement, 60, "everybody agrees")
