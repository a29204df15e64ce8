# SPDX-License-Identifier: Apache-2.0
"""Real torchruns that the network keeps from the store, on the product's own terms: for minutes."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from agent.rundir.reports import read_lines
from tests.support.training.job import Job, RunJob, draining_job
from tests.support.training.pods import Node

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(900)]

EVERY = 20
SAVES = {"DRAIN_LOOP_ALL_EVERY": str(EVERY), "DRAIN_LOOP_TAG": "1"}
CUT_TIMEOUT_S = 300.0
"""For a lease to end, and for the minute after it."""


def record(job: Job) -> dict[str, Any]:
    """The last commit; empty for none."""
    kv = job.witness.kvs().get(job.keys.last_commit)
    fields: dict[str, Any] = {} if kv is None else json.loads(kv.value)
    return fields


def writers(job: Job) -> dict[str, set[int]]:
    """By save tag: the processes that have written checkpoints with it."""
    found: dict[str, set[int]] = defaultdict(set)
    for path in job.settings.checkpoints.glob("*.json"):
        found[path.name.partition(".")[0]].add(json.loads(path.read_text())["pid"])
    return found


def waits(node: Node) -> bool:
    """Whether its sidecar has told the ranks to wait for a lease."""
    return "its ranks wait" in node.sidecar_log()


def test_i1_two_worlds_at_once_write_no_path_twice(run_job: RunJob, embedded: list[str]) -> None:
    with draining_job(
        run_job, embedded, least=1, most=1, lease_s=8.0, proxied=True, script_environ=SAVES
    ) as job:
        (cut,) = job.add()
        world = job.world_of([cut])
        (spare,) = job.add()
        job.until(lambda: record(job), CUT_TIMEOUT_S, "a periodic save is on record")
        first = record(job)["tag"]
        job.cut_store([cut])
        later = job.world_of([spare], CUT_TIMEOUT_S, not_=world)
        job.goes_on(world, 2 * EVERY)
        job.goes_on(later, 2 * EVERY)
        job.until(lambda: record(job)["tag"] > first, CUT_TIMEOUT_S, "the later world's is newer")
        assert writers(job) == {
            first: {worker.pid for worker in world.workers.values()},
            record(job)["tag"]: {worker.pid for worker in later.workers.values()},
        }
        job.mend_store()
        job.until(
            lambda: not job.processes(cut.name) & {worker.pid for worker in world.workers.values()},
            CUT_TIMEOUT_S,
            "the world that was cut off ends",
        )
        job.goes_on(later)


def test_i1_a_world_that_holds_on_a_cut_makes_no_step_beside_another(
    run_job: RunJob, embedded: list[str]
) -> None:
    with draining_job(
        run_job,
        embedded,
        **{"least": 1, "most": 1, "lease_s": 8.0, "proxied": True},
        script_environ=SAVES,
        sidecar_environ={"MUSTER_ON_CUT": "hold"},
    ) as job:
        (cut,) = job.add()
        world = job.world_of([cut])
        (spare,) = job.add()
        job.cut_store([cut])
        held = lambda: any(line.held for line in read_lines(cut.run_dir / "progress"))  # noqa: E731
        job.until(held, CUT_TIMEOUT_S, "the rank waits")
        job.steps.worlds()
        made = len(world.steps_s)
        later = job.world_of([spare], CUT_TIMEOUT_S, not_=world)
        job.goes_on(later, 2 * EVERY)
        assert len(world.steps_s) == made
        job.mend_store()
        job.goes_on(later)
        assert len(world.steps_s) == made


def test_i5_a_world_that_holds_on_a_cut_goes_on_as_it_was(
    run_job: RunJob, embedded: list[str]
) -> None:
    with draining_job(
        run_job,
        embedded,
        **{"least": 2, "most": 2, "lease_s": 8.0, "proxied": True},
        script_environ=SAVES,
        sidecar_environ={"MUSTER_ON_CUT": "hold"},
    ) as job:
        nodes = job.add(2)
        world = job.world_of(nodes)
        job.cut_store(nodes)
        job.until(lambda: all(map(waits, nodes)), CUT_TIMEOUT_S, "all ranks wait")
        job.mend_store()
        job.undisturbed(world)
