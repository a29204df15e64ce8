# SPDX-License-Identifier: Apache-2.0
"""A world changes in place: real torchruns and sidecars, and workers that live through it."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from typing import Any

import pytest

from tests.support.training.drain_job import DRAINED_STATUS, gone, terminate
from tests.support.training.job import FORM_TIMEOUT_S, Job, RunJob
from tests.support.training.pods import ROOT, Node
from tests.support.training.step_log import step_lines

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

SCRIPT = ROOT / "tests" / "support" / "scripts" / "world_loop.py"


def in_place(run_job: RunJob, endpoints: list[str], **settings: Any) -> Any:
    """A job whose script lets its world change in place."""
    return run_job(
        endpoints,
        **{"wrapped": True, "lease_s": 8.0, "script": SCRIPT, "least": 1} | settings,
        sidecar_environ={"MUSTER_GRACE_S": "90"},
    )


def size_of(job: Job) -> int:
    """The number of ranks that made the newest step."""
    made: dict[int, set[int]] = {}
    for _, step, size in rows(job):
        made.setdefault(step, set()).add(size)
    return max(made[max(made)]) if made else 0


def rows(job: Job) -> list[tuple[float, int, int]]:
    """Time, step and size of each line."""
    found = []
    for path in job.steps.directory.iterdir():
        for line in path.read_text().splitlines():
            parts = line.split()
            if len(parts) == 7:
                found.append((float(parts[0]), int(parts[1]), int(parts[3])))
    return sorted(found)


def until_size(job: Job, size: int) -> None:
    """Wait until ``size`` ranks make steps."""
    job.until(lambda: size_of(job) == size, FORM_TIMEOUT_S, f"{size} ranks train")


def processes(job: Job, node: Node) -> set[str]:
    """The workers of a node that have made steps."""
    return {path.name for path in job.steps.directory.glob(f"{node.name}.*")}


def each_step_once(job: Job) -> None:
    """No rank leaves a step out, or makes one twice, and none does after it came in late."""
    for path in job.steps.directory.iterdir():
        steps = [int(line.split()[1]) for line in path.read_text().splitlines()]
        assert all(after == before + 1 for before, after in pairwise(steps)), path.name
    made_once(job)


def made_once(job: Job) -> None:
    """Every step is made, and in one world alone."""
    worlds: dict[int, set[int]] = {}
    for _, step, world in step_lines(job.steps.directory):
        worlds.setdefault(step, set()).add(world)
    assert sorted(worlds) == list(range(1, max(worlds) + 1))
    twice = {step: found for step, found in worlds.items() if len(found) > 1}
    assert not twice, f"made in two worlds: {twice}"


def test_a_node_joins_and_rank_0_leaves_in_place(run_job: RunJob, embedded: list[str]) -> None:
    with in_place(run_job, embedded) as job:
        first, second = job.add(2)
        until_size(job, 2)
        (third,) = job.add()
        until_size(job, 3)
        terminate(job, first)
        assert gone(job, first) == DRAINED_STATUS
        until_size(job, 2)
        job.stop_training()
        assert set(job.launchers_end()) == {0}
        job.until(lambda: job.round.closed == "success", 60, "it is closed by success")
        each_step_once(job)
        assert [len(processes(job, one)) for one in (first, second, third)] == [1, 1, 1]


def test_the_loss_of_rank_0_and_of_a_worker_costs_no_step(
    run_job: RunJob, embedded: list[str]
) -> None:
    with in_place(run_job, embedded) as job:
        first, second, third = job.add(3)
        until_size(job, 3)
        job.kill_node(first)
        until_size(job, 2)
        (worker,) = processes(job, third)
        os.kill(int(worker.rpartition(".")[2]), signal.SIGKILL)
        job.until(lambda: len(processes(job, third)) == 2, FORM_TIMEOUT_S, "it has another worker")
        until_size(job, 2)
        job.stop_training()
        assert set(job.launchers_end()) == {0}
        made_once(job)
        assert len(processes(job, second)) == 1
