# SPDX-License-Identifier: Apache-2.0
"""Real torchrun jobs while nodes, sidecars and the store come, go, freeze and die.

What becomes of the rendezvous is proven in ``tests/contract``, for every moment; here torch's own
agents and workers go through it, once for each promise, and in ``--long`` in every way.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.ports import free_ports
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.training.job import FORM_TIMEOUT_S, STEP_LOOP, Job, RunJob
from tests.support.training.pods import Node
from tests.support.training.step_log import World

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

Act = Callable[[Job, Node], object]
STEP_S = 0.05
"""A step takes at least this."""

long = pytest.mark.long


# -- a node is lost, and comes back or is replaced


def dies(job: Job, node: Node) -> None:
    job.kill_node(node)


def is_replaced(job: Job, node: Node) -> None:
    job.add()


def sidecar_dies(job: Job, node: Node) -> None:
    """Without muster-run, torch's client sees its connection end, and never reconnects."""
    job.kill_sidecar(node)
    assert node.launcher is not None
    assert node.launcher.wait(120) == 1


def sidecar_and_torchrun_start(job: Job, node: Node) -> None:
    job.start_again(node)
    job.start_launcher(node)


LOSSES: list[tuple[str, int, Act, Act]] = [
    ("the node of rank 0 is killed", 0, dies, is_replaced),
    ("another node is killed", -1, dies, is_replaced),
    ("a node is terminated", 1, Job.stop_node, is_replaced),
    ("torchrun and its workers are killed", 0, Job.kill_agent_with_workers, Job.start_launcher),
    ("torchrun is killed alone", 1, Job.kill_agent_only, Job.start_launcher),
    ("a node freezes beyond its lease", 1, Job.freeze, Job.resume),
    ("a sidecar freezes beyond its lease", 0, Job.freeze_sidecar, Job.resume),
    ("a sidecar is killed without muster-run", 0, sidecar_dies, sidecar_and_torchrun_start),
]


@pytest.fixture(scope="module", params=[1, 2])
def job(request: pytest.FixtureRequest, run_job: RunJob, embedded: list[str]) -> Iterator[Job]:
    """One job that goes through all losses, with one and with two processes a node."""
    with run_job(embedded, slots=request.param, least=2, most=4) as job:
        job.add(3)
        yield job


@long
@pytest.mark.parametrize(
    ("rank", "befalls", "mends"), [pytest.param(*what, id=name) for name, *what in LOSSES]
)
def test_the_others_go_on_and_it_comes_back(job: Job, rank: int, befalls: Act, mends: Act) -> None:
    world, before = job.world_of(job.nodes.values()), job.round.number
    victim = job.nodes[world.workers[rank % world.size].node]
    befalls(job, victim)
    smaller = job.world_of([node for node in job.nodes.values() if node is not victim])
    if befalls is dies:
        # Nobody sat out a last call, as torch does alone.
        said = [line for n in job.nodes.values() for line in n.sidecar_log().splitlines()]
        words = (f"round {job.round.number}: ", "no other node is expected: complete")
        assert any(all(word in line for word in words) for line in said)
    job.goes_on(smaller)
    assert job.restarts_burnt(world) <= job.round.number - before
    mends(job, victim)
    job.world_of(job.nodes.values(), not_=smaller)
    job.until(job.in_agreement, 60, "everybody agrees")
    job.never_two_worlds()


# -- too few, and too many

JOIN_S = 5
"""The time to join that a torchrun is given, where torch's own is 600 s."""


def gives_up_alone(directory: Path) -> bool:
    """Whether a torchrun without Muster ends by that time-out if it waits for another one."""
    (port,) = free_ports(1)
    line = (
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--rdzv-backend=c10d"),
        *(f"--rdzv-endpoint=localhost:{port}", f"--rdzv-conf=join_timeout={JOIN_S}"),
        str(STEP_LOOP),
    )
    ended = subprocess.run(
        line, cwd=directory, capture_output=True, text=True, timeout=FORM_TIMEOUT_S, check=False
    )
    return ended.returncode == 1 and "RendezvousTimeoutError" in ended.stderr


@long
def test_below_min_nobody_trains_and_beyond_max_a_spare_stands_by_and_takes_over(
    run_job: RunJob, embedded: list[str]
) -> None:
    with run_job(embedded, least=2, most=2, wrapped=True) as job:
        job.script_environ["PET_RDZV_CONF"] = f"join_timeout={JOIN_S}"
        (first,) = job.add()
        del job.script_environ["PET_RDZV_CONF"]
        (second,) = job.add()
        world = job.world_of([first, second])
        job.kill_node(second)
        job.until_members(first)
        job.until(lambda: job.state(first) == "asking", FORM_TIMEOUT_S, "it asks for others")
        assert gives_up_alone(job.directory)
        assert first.launcher is not None
        assert first.launcher.poll() is None
        assert job.steps.worlds()[-1] is world
        job.add()
        full = job.world_of(job.nodes.values())

        (spare,) = job.add()
        job.until(lambda: job.state(spare), FORM_TIMEOUT_S, "the spare's torchrun asks")
        job.undisturbed(full)
        assert spare.launcher is not None
        assert spare.launcher.poll() is None
        job.kill_node(job.nodes[full.workers[0].node])
        assert spare.name in job.world_of(job.nodes.values()).nodes
        job.never_two_worlds()


# -- pods that cannot train


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=long)])
def calm(request: pytest.FixtureRequest, run_job: RunJob, embedded: list[str]) -> Iterator[Job]:
    """A job that loses nobody; the launcher of its first pod never comes."""
    with run_job(embedded, slots=request.param, least=2, most=2, lease_s=30.0) as job:
        job.add(launch=False)
        job.add(2)
        yield job


def launched(job: Job) -> list[Node]:
    return [node for node in job.nodes.values() if node.launcher is not None]


def test_a_spare_trains_in_the_place_of_a_pod_whose_launcher_never_comes(calm: Job) -> None:
    calm.goes_on(calm.world_of(launched(calm)))
    calm.never_two_worlds()


def test_a_second_torchrun_in_a_pod_is_refused_and_the_first_trains_on(calm: Job) -> None:
    world = calm.world_of(launched(calm))
    node = calm.nodes[world.workers[0].node]
    first = node.launcher
    # As by ``kubectl exec``.
    calm.start_launcher(node)
    second, node.launcher = node.launcher, first
    assert second is not None
    assert second.wait(FORM_TIMEOUT_S) == 1
    assert "a pod has one place in its job: end that one first" in node.sidecar_log()
    calm.undisturbed(world)


def test_a_spare_stands_by_and_takes_the_place_of_a_node_that_is_killed(calm: Job) -> None:
    world = calm.world_of(launched(calm))
    (spare,) = (node for node in calm.nodes.values() if node.launcher is None)
    calm.start_launcher(spare)
    calm.until(lambda: calm.state(spare), FORM_TIMEOUT_S, "the spare's torchrun asks")
    calm.undisturbed(world)
    before = calm.round.number
    calm.kill_node(calm.nodes[world.workers[0].node])
    again = calm.world_of(calm.nodes.values(), not_=world)
    assert spare.name in again.nodes
    calm.goes_on(again)
    assert calm.restarts_burnt(world) <= calm.round.number - before
    calm.until(calm.in_agreement, 60, "everybody agrees")
    calm.never_two_worlds()


# -- what a job takes no notice of


@contextmanager
def unnoticed(job: Job) -> Iterator[World]:
    """The job takes no notice of what is done in the block: no other world, process or round."""
    world = job.world_of(job.nodes.values())
    job.until(job.in_agreement, 60, "everybody agrees")
    before = job.round
    yield world
    job.until(job.in_agreement, 60, "store, host lists and metrics agree again")
    job.undisturbed(world, 40)
    assert (job.round.number, job.round.frozen) == (before.number, before.frozen)
    assert all(n.launcher is not None and n.launcher.poll() is None for n in job.nodes.values())
    job.never_two_worlds()


def killed_one_by_one(job: Job) -> None:
    for node in job.nodes.values():
        job.kill_sidecar(node)
        job.start_again(node)


def killed_all_at_once(job: Job) -> None:
    for node in job.nodes.values():
        job.kill_sidecar(node)
    for node in job.nodes.values():
        job.start_sidecar(node)
    job.until_ready(*job.nodes.values())


def replaced_in_place(job: Job) -> None:
    for node in job.nodes.values():
        job.stop_sidecar(node)
        job.start_again(node)


def frozen_for_400_steps(job: Job) -> None:
    victim = job.nodes[max(job.nodes)]
    job.freeze_sidecar(victim)
    job.goes_on(job.steps.worlds()[-1], 400)
    job.resume(victim)


@pytest.mark.parametrize(
    "befalls",
    [
        killed_all_at_once,
        *(pytest.param(each, marks=long) for each in (killed_one_by_one, replaced_in_place)),
        pytest.param(frozen_for_400_steps, marks=long),
    ],
)
def test_what_becomes_of_sidecars_within_the_lease_is_not_noticed_and_the_end_is_told(
    run_job: RunJob, embedded: list[str], befalls: Callable[[Job], None]
) -> None:
    with run_job(embedded, least=2, most=2, lease_s=120.0, wrapped=True) as job:
        job.add(2)
        with unnoticed(job):
            befalls(job)
            job.until(
                lambda: all(n.metric("muster_c10d_connections") for n in job.nodes.values()),
                60,
                "each torchrun is connected to its sidecar",
            )
        job.stop_training()
        assert job.launchers_end() == [0, 0]
        job.until(lambda: job.round.closed == "success", 60, "it is closed by success")


@long
def test_a_torchrun_whose_sidecar_was_away_beyond_the_lease_comes_back(
    run_job: RunJob, embedded: list[str]
) -> None:
    with run_job(embedded, least=1, most=2, wrapped=True) as job:
        first, victim = job.add(2)
        job.world_of(job.nodes.values())
        job.kill_sidecar(victim)
        job.goes_on(job.world_of([first]))
        job.start_again(victim)
        job.world_of(job.nodes.values())
        assert victim.launcher is not None
        assert victim.launcher.poll() is None
        job.never_two_worlds()


# -- the store fails: three real etcd members


@pytest.fixture(scope="module")
def cluster() -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        yield cluster


@pytest.mark.etcd
def test_i5_training_takes_no_notice_of_everybody_cut_off_for_three_leases(
    run_job: RunJob, cluster: EtcdCluster
) -> None:
    """Every other failure of the store is in ``tests/chaos/test_fault_matrix.py``."""
    with run_job(cluster.endpoints, least=2, most=4, proxied=True) as job:
        job.add(2)
        with unnoticed(job) as world:
            job.cut_store(job.nodes.values())
            job.until_members()  # all leases have ended
            job.goes_on(world, round(3 * job.lease_s / STEP_S))
            assert all(sorted(node.hosts()) == sorted(job.nodes) for node in job.nodes.values())
            assert all(node.ask("healthz")[0] == 200 for node in job.nodes.values())
            job.mend_store()


@long
@pytest.mark.etcd
def test_i5_a_node_that_dies_during_an_outage_is_missed_after_it(
    run_job: RunJob, cluster: EtcdCluster
) -> None:
    with run_job(cluster.endpoints, least=2, most=4) as job:
        job.add(3)
        world = job.world_of(job.nodes.values())
        for member in range(len(cluster)):
            cluster.kill(member)
        job.kill_node(job.nodes[world.workers[1].node])
        cluster.restore()
        job.world_of(job.nodes.values())
        job.until(job.in_agreement, 60, "everybody agrees")
        job.never_two_worlds()


@long
@pytest.mark.etcd
@pytest.mark.parametrize("uid", ["the-job", ""])
def test_i1_newcomers_while_all_others_are_cut_off(
    run_job: RunJob, cluster: EtcdCluster, uid: str
) -> None:
    """With the job's UID they form no second world; without one they begin its next life."""
    with run_job(cluster.endpoints, least=2, most=4, proxied=True) as job:
        old = job.add(2, uid=uid)
        world = job.world_of(old)
        job.cut_store(old)
        job.until_members()
        new = job.add(2, uid=uid)
        if uid:
            job.until(
                lambda: all(job.state(node) == "asking" for node in new),
                FORM_TIMEOUT_S,
                "the newcomers ask",
            )
            job.undisturbed(world, round(3 * job.lease_s / STEP_S))
            assert job.steps.worlds() == [world]
        else:
            job.world_of(new)
        job.mend_store()
        job.world_of(job.nodes.values())
        job.until(job.in_agreement, 60, "everybody agrees")
        if uid:
            job.never_two_worlds()
