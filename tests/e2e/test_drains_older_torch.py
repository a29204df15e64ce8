# SPDX-License-Identifier: Apache-2.0
"""Drains under an unmodified torch 2.6.0, whose agents close the whole run when they are ended."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.support.training.drain_job import draining_job
from tests.support.training.drains import a_row_of_drains
from tests.support.training.job import Job
from tests.support.training.older_torch import SETUP_TIMEOUT_S, python_with_torch

pytestmark = [
    pytest.mark.torch,
    pytest.mark.long,
    pytest.mark.timeout(SETUP_TIMEOUT_S + 600),
]

RunJob = Callable[..., AbstractContextManager[Job]]


@pytest.mark.parametrize("version", ["2.6.0", "2.9.1"])
def test_drains_in_a_row_lose_no_step_and_close_no_run(
    run_job: RunJob, embedded: list[str], version: str
) -> None:
    python = python_with_torch(version)
    with draining_job(run_job, embedded, least=2, most=4, python=python) as job:
        job.add(3)
        a_row_of_drains(job, 5)
        assert job.round.closed == ""
