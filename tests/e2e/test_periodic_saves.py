# SPDX-License-Identifier: Apache-2.0
"""Real torchrun jobs that save periodically, and lose all of their nodes at once."""

from __future__ import annotations

import json

import pytest

from tests.support.training.drain_job import draining_job, first_step
from tests.support.training.job import Job, RunJob

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

EVERY = 20


def last_commit(job: Job) -> int:
    """The step that is on record as saved by all ranks; 0 for none."""
    kv = job.witness.kvs().get(job.keys.last_commit)
    return 0 if kv is None else int(json.loads(kv.value)["step"])


def test_after_kill_9_of_all_nodes_it_goes_on_from_the_newest_periodic_save_of_all(
    run_job: RunJob, embedded: list[str]
) -> None:
    saves = {"DRAIN_LOOP_ALL_EVERY": str(EVERY)}
    with draining_job(
        run_job, embedded, least=2, most=2, script_environ=saves, lease_s=10.0
    ) as job:
        nodes = job.add(2)
        world = job.world_of(nodes)
        job.until(lambda: last_commit(job) >= EVERY, 120, "a periodic save is on record")
        job.kill_nodes(*nodes)
        step = last_commit(job)
        assert step % EVERY == 0
        again = job.add(2)
        job.goes_on(job.world_of(again, not_=world))
        assert {first_step(job, node) for node in again} == {step + 1}
        told = [int(node.metric("muster_last_commit_step")) for node in again]
        assert all(one >= step for one in told)
