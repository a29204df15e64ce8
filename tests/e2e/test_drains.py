# SPDX-License-Identifier: Apache-2.0
"""Pods are told to go, under a real torchrun: nothing is lost, nothing is trained twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.support.training import drain_job as drills
from tests.support.training.drain_job import (
    draining_job,
    nothing_lost,
)
from tests.support.training.drains import (
    STEPS_BETWEEN,
    a_row_of_drains,
    drain_and_replace,
)
from tests.support.training.job import Job

pytestmark = [pytest.mark.torch, pytest.mark.timeout(500)]

RunJob = Callable[..., AbstractContextManager[Job]]


def test_drains_in_a_row_lose_no_step_and_repeat_none(run_job: RunJob, embedded: list[str]) -> None:
    with draining_job(run_job, embedded, slots=2, least=2, most=4) as job:
        job.add(3)
        a_row_of_drains(job, 2)


def test_two_drains_at_once_share_one_commit_and_one_round(
    run_job: RunJob, embedded: list[str]
) -> None:
    with draining_job(run_job, embedded, least=2, most=4) as job:
        job.add(4)
        world = job.world_of(job.nodes.values())
        job.goes_on(world, STEPS_BETWEEN)
        before = job.round.number
        pair = [job.nodes[name] for name in sorted(job.nodes)[:2]]
        drain_and_replace(job, world, pair, drills.sigterm, replace=0)
        assert job.round.number == before + 1
        nothing_lost(job)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("slots", [1, 2])
def test_thirty_drains_in_a_row(run_job: RunJob, embedded: list[str], slots: int) -> None:
    with draining_job(run_job, embedded, slots=slots, least=2, most=4) as job:
        job.add(3)
        a_row_of_drains(job, 30)
