# SPDX-License-Identifier: Apache-2.0
"""Real torchruns beside a pod that cannot train: its launcher never comes, or dies each time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from rdzv.records.quarantine import TERMS, Quarantine
from tests.support.training.job import FORM_TIMEOUT_S, Job

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

RunJob = Callable[..., AbstractContextManager[Job]]


def test_a_spare_trains_in_the_place_of_a_pod_whose_launcher_never_comes(
    run_job: RunJob, embedded: list[str]
) -> None:
    with run_job(embedded, least=2, most=2) as job:
        job.add(launch=False)
        world = job.world_of(job.add(2))
        job.goes_on(world)
        job.never_two_worlds()


def test_a_crash_loop_stops_the_healthy_no_more(run_job: RunJob, embedded: list[str]) -> None:
    with run_job(embedded, least=2, most=3) as job:
        healthy = job.add(2)
        job.world_of(healthy)
        bad = job.add(launch=False)[0]
        pod_uid = job.witness.sight.membership.members[bad.name].pod_uid
        # All but one of the deaths that it takes.
        before = Quarantine(bad.name, pod_uid, TERMS.deaths - 1, "before")
        job.witness.put(job.keys.in_generation(1).quarantine(bad.name), before.to_json())
        job.start_launcher(bad)
        job.world_of([*healthy, bad])
        job.kill_agent_with_workers(bad)
        calm = job.world_of(healthy)
        job.start_launcher(bad)
        job.until(lambda: state(job, bad.name) == "asking", FORM_TIMEOUT_S, "it asks again")
        job.goes_on(calm)
        job.kill_agent_with_workers(bad)
        job.until(lambda: state(job, bad.name) == "left", FORM_TIMEOUT_S, "it is gone")
        assert job.steps.worlds()[-1] is calm
        record = job.witness.sight.membership.quarantines[bad.name]
        assert record.out
        job.never_two_worlds()


def state(job: Job, name: str) -> str:
    """Where the node of ``name`` stands in the store."""
    node = job.witness.sight.nodes.get(name)
    return node.state if node else ""
