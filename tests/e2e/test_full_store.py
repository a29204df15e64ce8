# SPDX-License-Identifier: Apache-2.0
"""A real etcd over its quota under a real job: it goes on with the world that it has.

What a full store refuses, and what becomes of each part, is proven in ``tests/contract`` and in the
simulation (``refusals``); here an operator needs a while to see to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.full import SMALL, cure, fill_at_once
from tests.support.training.job import Job, RunJob, draining_job
from tests.support.training.step_log import World

pytestmark = [pytest.mark.torch, pytest.mark.etcd, pytest.mark.long, pytest.mark.timeout(900)]

LEASES = 3
"""For so many leases of a member the store takes no writes."""


@pytest.fixture
def small() -> Iterator[EtcdCluster]:
    with EtcdCluster(1, arguments=SMALL) as cluster:
        yield cluster


def fill_up(job: Job, cluster: EtcdCluster) -> None:
    fill_at_once(cluster)
    job.tell("the store takes no writes")


def stood_still_s(world: World) -> float:
    """The longest time between two of its steps."""
    return max(later - former for former, later in pairwise(sorted(world.steps_s)))


def trains_on(job: Job, world: World) -> None:
    """Wait until it has made more steps than it has by now."""
    job.steps.worlds()
    job.undisturbed(world)


def test_a_sidecar_that_starts_again_costs_no_world_while_the_store_is_full(
    run_job: RunJob, small: EtcdCluster
) -> None:
    with draining_job(run_job, small.endpoints, lease_s=8.0) as job:
        world = job.trains(2)
        fill_up(job, small)
        for node in job.nodes.values():
            job.kill_sidecar(node)
            job.start_again(node)
        time.sleep(LEASES * job.lease_s)
        trains_on(job, world)
        assert "the store takes no writes (NOSPACE)" in job.muster("status")
        cure(small)
        job.until(job.in_agreement, 120, "everybody is registered again, and in its round")
        trains_on(job, world)
        job.tell(f"it stood still for {stood_still_s(world):.1f} s at most")


def test_a_join_that_a_full_store_does_not_finish_costs_no_world(
    run_job: RunJob, small: EtcdCluster
) -> None:
    with draining_job(run_job, small.endpoints, lease_s=8.0) as job:
        world = job.trains(2)
        with job.saves_held():
            (newcomer,) = job.add()
            job.until(
                lambda: job.witness.commits and job.witness.commits[-1][1].phase == "commit",
                120,
                "all are asked to save, so that the newcomer joins",
            )
            fill_up(job, small)
        trains_on(job, world)
        assert newcomer.name not in world.nodes
        cure(small)
        job.goes_on(job.world_of(job.nodes.values(), not_=world))
        job.tell(f"it stood still for {stood_still_s(world):.1f} s at most")
        job.never_two_worlds()
