# SPDX-License-Identifier: Apache-2.0
"""Unmodified older releases of torch: join, scale up, kill, and SIGTERM of one agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.support.training.job import Job
from tests.support.training.older_torch import SETUP_TIMEOUT_S, python_with_torch

pytestmark = [
    pytest.mark.torch,
    pytest.mark.long,
    pytest.mark.timeout(SETUP_TIMEOUT_S + 300),
]


@pytest.fixture(scope="module", params=["2.6.0", "2.9.1"])
def job(
    request: pytest.FixtureRequest,
    run_job: Callable[..., AbstractContextManager[Job]],
    embedded: list[str],
) -> Iterator[Job]:
    python = python_with_torch(request.param)
    with run_job(embedded, least=2, most=4, python=python) as job:
        yield job


@pytest.fixture(autouse=True)
def _one_world_at_a_time(job: Job) -> Iterator[None]:
    yield
    job.never_two_worlds()


def test_nodes_join_and_the_job_scales_up(job: Job) -> None:
    job.add(2)
    world = job.world_of(job.nodes.values(), 120)
    job.add()
    grown = job.world_of(job.nodes.values(), 120)
    assert world.restarts == 0
    assert grown.restarts <= 1


def test_one_agent_is_terminated_and_the_others_go_on(job: Job) -> None:
    # torch 2.3 to 2.7 closes the whole rendezvous here; the sidecar does not pass that on.
    world = job.world_of(job.nodes.values(), 120)
    job.stop_node(job.nodes[world.workers[0].node])
    smaller = job.world_of(job.nodes.values(), 120)
    job.goes_on(smaller)
    assert job.round.closed == ""


def test_one_node_is_killed_and_replaced(job: Job) -> None:
    job.add()
    world = job.world_of(job.nodes.values(), 120)
    job.kill_node(job.nodes[world.workers[0].node])
    job.world_of(job.nodes.values(), 120)
    job.add()
    job.world_of(job.nodes.values(), 120)


def test_it_ends_well(job: Job) -> None:
    launchers = [node.launcher for node in job.nodes.values() if node.launcher is not None]
    job.stop_training()
    job.until(lambda: all(p.poll() is not None for p in launchers), 60, "every torchrun ends")
    assert {p.wait() for p in launchers} == {0}
    assert job.round.closed == "success"
