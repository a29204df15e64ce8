# SPDX-License-Identifier: Apache-2.0
"""A world changes in place: real torchruns and sidecars, and workers that live through it."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.training.in_place_drill import in_world_of, worker_of
from tests.support.training.in_place_log import assert_each_sample_once
from tests.support.training.job import DRAINED_STATUS, FORM_TIMEOUT_S, Job, RunJob, account_of
from tests.support.training.pods import ROOT, Node

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

SCRIPTS = ROOT / "tests" / "support" / "scripts"
SCRIPT = SCRIPTS / "world_loop.py"


def in_place(run_job: RunJob, endpoints: list[str], **settings: Any) -> Any:
    """A job whose script lets its world change in place."""
    return run_job(
        endpoints,
        **{"wrapped": True, "lease_s": 8.0, "script": SCRIPT, "least": 1} | settings,
        script_environ={"WORLD_LOOP_STEP_S": "0.2"},
        sidecar_environ={"MUSTER_GRACE_S": "90"},
    )


def made(path: Path) -> list[tuple[int, int]]:
    """Each step that a process has made, and the size of its world then."""
    whole, _, _ = path.read_text().rpartition("\n")  # half a line may be the last
    return [(int(step), int(size)) for _, step, _, size, *_ in map(str.split, whole.splitlines())]


def until_size(job: Job, size: int) -> None:
    """Wait until ``size`` ranks make the newest step."""

    def trains() -> bool:
        steps = [step for path in job.steps.directory.iterdir() for step in made(path)]
        return max(steps, default=(0, 0))[1] == size

    job.until(trains, FORM_TIMEOUT_S, f"{size} ranks train")


def processes(job: Job, node: Node) -> set[str]:
    """The workers of a node that have made steps."""
    return {path.name for path in job.steps.directory.glob(f"{node.name}.*")}


def each_step_once(job: Job) -> None:
    """No rank leaves a step out, or makes one twice, and none does after it came in late."""
    for path in job.steps.directory.iterdir():
        steps = [step for step, _ in made(path)]
        assert all(after == before + 1 for before, after in pairwise(steps)), path.name
    made_once(job)


def made_once(job: Job) -> None:
    """Every step is made, and in one world alone."""
    told = account_of(job.steps.directory)
    assert (told.lost, told.twice) == ([], [])


def test_a_join_a_drain_and_losses_change_a_world_in_place(
    run_job: RunJob, embedded: list[str]
) -> None:
    """Each time of rank 0. No step is lost by it."""
    # No lease ends while the test lasts: the others evict the node, as its world is broken.
    with in_place(run_job, embedded, lease_s=600.0) as job:
        first, second = job.add(2)
        until_size(job, 2)
        (third,) = job.add()
        until_size(job, 3)
        job.terminate(first)
        assert job.gone(first) == DRAINED_STATUS
        until_size(job, 2)
        each_step_once(job)
        (fourth,) = job.add()
        until_size(job, 3)
        assert job.round.frozen[0].member == second.name
        job.kill_node(second)
        until_size(job, 2)
        lose_worker(job, fourth)
        job.stop_training()
        assert set(job.launchers_end()) == {0}
        job.until(lambda: job.round.closed == "success", 60, "it is closed by success")
        made_once(job)
        assert [len(processes(job, one)) for one in (first, second, third)] == [1, 1, 1]


def lose_worker(job: Job, node: Node) -> None:
    """Kill the worker of one of two nodes, and wait until both train again."""
    (worker,) = processes(job, node)
    os.kill(int(worker.rpartition(".")[2]), signal.SIGKILL)
    job.until(lambda: len(processes(job, node)) == 2, FORM_TIMEOUT_S, "it has another worker")
    until_size(job, 2)


def test_the_library_trains_on_through_a_join_a_drain_and_a_loss_until_the_last_pod_saves(
    run_job: RunJob, embedded: list[str]
) -> None:
    example = ROOT / "examples" / "torch_in_place.py"
    with in_place(run_job, embedded, script=example) as job:
        job.script_environ |= {"STEPS": "100000", "CHECKPOINT_DIR": str(job.directory / "saved")}
        first, second = job.add(2)
        in_world_of(job, first, second)
        third, fourth = job.add(2)
        in_world_of(job, first, second, third, fourth)
        workers = {node.name: worker_of(node) for node in (second, third)}
        job.terminate(first)
        assert job.gone(first) == DRAINED_STATUS
        in_world_of(job, second, third, fourth)
        job.kill_node(fourth)
        in_world_of(job, second, third)
        assert {node.name: worker_of(node) for node in (second, third)} == workers
        job.terminate(second)
        assert job.gone(second) == DRAINED_STATUS
        in_world_of(job, third)
        job.terminate(third)
        drain = job.released(third)
        assert drain.outcome == "committed"
        assert job.gone(third) == DRAINED_STATUS
        assert "too few stay" in third.sidecar_log()
        (saved,) = (job.directory / "saved").glob(f"*-{drain.step:08d}.pt")
        assert saved.exists()


@pytest.mark.long
@pytest.mark.parametrize("trainer", ["transformers", "lightning"])
def test_a_trainer_lives_through_a_join_a_drain_and_a_kill(
    run_job: RunJob, embedded: list[str], trainer: str
) -> None:
    with in_place(run_job, embedded, script=SCRIPTS / f"in_place_{trainer}.py") as job:
        job.script_environ |= {"CHECKPOINT_DIR": str(job.directory / "saved")}
        first, second = job.add(2)
        until_size(job, 2)
        (third,) = job.add()
        until_size(job, 3)
        job.terminate(first)
        assert job.gone(first) == DRAINED_STATUS
        until_size(job, 2)
        lose_worker(job, third)
        job.stop_training()
        assert set(job.launchers_end()) == {0}
        job.until(lambda: job.round.closed == "success", 60, "it is closed by success")
        made_once(job)
        assert_each_sample_once(job.steps.directory)
        assert [len(processes(job, one)) for one in (first, second, third)] == [1, 1, 2]
        assert not [*(job.directory / "saved").rglob("checkpoint-*")], "a change saves nothing"
