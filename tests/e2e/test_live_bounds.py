# SPDX-License-Identifier: Apache-2.0
"""A real torchrun job whose bounds change while it trains, and that is paused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.support.sidecars.processes import PATIENT
from tests.support.training.drain_job import draining_job, nothing_lost
from tests.support.training.job import FORM_TIMEOUT_S, Job
from tests.support.training.pods import ROOT

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

RunJob = Callable[..., AbstractContextManager[Job]]


def muster(job: Job, *arguments: str) -> str:
    """Run a command on the job, to its end; return what it prints."""
    ended = subprocess.run(
        [sys.executable, *PATIENT, *arguments, job.name],
        cwd=ROOT,
        env={
            **os.environ,
            "MUSTER_NAMESPACE": job.keys.namespace,
            "MUSTER_ETCD_ENDPOINTS": ",".join(job.endpoints),
        },
        capture_output=True,
        text=True,
        timeout=FORM_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    job.tell(f"muster {' '.join(arguments)}: {ended.stdout.strip()}")
    return ended.stdout


def test_bounds_change_by_a_roll_out_and_by_hand_and_no_step_is_lost(
    run_job: RunJob, embedded: list[str]
) -> None:
    with draining_job(run_job, embedded, least=2, most=2) as job:
        two = job.add(2)
        job.goes_on(job.world_of(two), 5)
        wider = job.add(environ={"MUSTER_MAX": "3"})
        three = job.world_of([*two, *wider])
        job.goes_on(three, 5)
        assert ": its template is the newest: max is 3 (before: 2)" in muster(job, "history")

        assert "1 of 3 members will stand by" in muster(job, "set", "--max", "2")
        fewer = job.until_world(
            lambda world: len(world.nodes) == 2, FORM_TIMEOUT_S, "two step in one world", three
        )
        job.goes_on(fewer, 5)

        said = muster(job, "pause", "--wait", "--reason", "night")
        assert said.splitlines()[-1].startswith("paused     no world trains")
        assert "paused since" in muster(job, "status")
        muster(job, "resume")
        again = job.until_world(
            lambda world: len(world.nodes) == 2, FORM_TIMEOUT_S, "two go on", fewer
        )
        job.goes_on(again, 5)
        nothing_lost(job)
