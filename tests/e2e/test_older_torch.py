# SPDX-License-Identifier: Apache-2.0
"""Unmodified older releases of torch: join, scale up, kill, SIGTERM of one agent, and drains.

The agents of torch 2.3 to 2.7 close the whole run when they are ended: sidecars do not pass it on.
"""

from __future__ import annotations

import pytest

from older_torch import SETUP_TIMEOUT_S, python_with_torch
from tests.support.training.job import RunJob, draining_job

pytestmark = [
    pytest.mark.torch,
    pytest.mark.long,
    pytest.mark.timeout(SETUP_TIMEOUT_S + 600),
    pytest.mark.parametrize("version", ["2.6.0", "2.9.1"]),
]


def test_a_job_grows_loses_nodes_in_every_way_and_ends_well(
    run_job: RunJob, embedded: list[str], version: str
) -> None:
    with run_job(embedded, least=2, most=4, python=python_with_torch(version)) as job:
        job.add(2)
        assert job.world_of(job.nodes.values()).restarts == 0
        job.add()
        grown = job.world_of(job.nodes.values())
        assert grown.restarts <= 1
        job.stop_node(job.nodes[grown.workers[0].node])
        smaller = job.world_of(job.nodes.values())
        job.goes_on(smaller)
        assert job.round.closed == ""
        job.add()
        world = job.world_of(job.nodes.values())
        job.kill_node(job.nodes[world.workers[0].node])
        job.world_of(job.nodes.values())
        job.add()
        job.world_of(job.nodes.values())
        job.stop_training()
        assert set(job.launchers_end()) == {0}
        job.until(lambda: job.round.closed == "success", 60, "it is closed by success")
        job.never_two_worlds()


def test_drains_in_a_row_lose_no_step_and_close_no_run(
    run_job: RunJob, embedded: list[str], version: str
) -> None:
    python = python_with_torch(version)
    with draining_job(run_job, embedded, least=2, most=4, python=python) as job:
        job.a_row_of_drains(5)
        assert job.round.closed == ""
