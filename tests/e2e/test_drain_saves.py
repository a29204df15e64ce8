# SPDX-License-Identifier: Apache-2.0
"""A save that does not succeed, under a real torchrun: what becomes of the drain and the others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.support.training import drain_job as drills
from tests.support.training.drain_job import (
    DRAINED_STATUS,
    draining_job,
    gone,
    nothing_lost,
    released,
)
from tests.support.training.job import Job

pytestmark = [pytest.mark.torch, pytest.mark.timeout(500)]

RunJob = Callable[..., AbstractContextManager[Job]]

FAILS_ONCE = {"DRAIN_LOOP_FAIL_SAVE": "0:1", "DRAIN_LOOP_ACCUMULATE": "2"}


def test_a_save_that_fails_once_is_tried_again_where_the_script_goes_on(
    run_job: RunJob, embedded: list[str]
) -> None:
    environ = {**FAILS_ONCE, "DRAIN_LOOP_CATCH": "1"}
    with draining_job(run_job, embedded, script_environ=environ) as job:
        leaver, *others = job.add(3)
        world = job.world_of(job.nodes.values())
        job.goes_on(world, 10)
        drills.terminate(job, leaver)
        drain = released(job, leaver)
        assert drain.outcome == "committed"
        assert drain.step is not None
        failed = [c for _, c in job.witness.commits if c.phase == "void"]
        assert "could not save" in failed[0].reason
        assert "No space left" in failed[0].reason
        drills.all_saved(job, drain.step, range(3))
        assert gone(job, leaver) == DRAINED_STATUS
        job.goes_on(job.world_of(others, not_=world), 10)
        nothing_lost(job)


@pytest.mark.long
def test_a_script_that_a_failed_save_ends_takes_its_round_along_but_not_the_drain(
    run_job: RunJob, embedded: list[str]
) -> None:
    with draining_job(run_job, embedded, script_environ=FAILS_ONCE) as job:
        leaver, *others = job.add(3)
        world = job.world_of(job.nodes.values())
        job.goes_on(world, 10)
        drills.terminate(job, leaver)
        assert released(job, leaver).outcome == "uncommitted"
        assert gone(job, leaver) == DRAINED_STATUS
        job.goes_on(job.world_of(others, not_=world), 10)
