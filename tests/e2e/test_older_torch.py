# SPDX-License-Identifier: Apache-2.0
"""Unmodified older releases of torch: join, scale up, kill, SIGTERM of one agent, and drains.

The agents of torch 2.3 to 2.7 close the whole run when they are ended: sidecars do not pass it on.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from older_torch import SETUP_TIMEOUT_S, python_with_torch
from tests.support.training.drain_job import a_row_of_drains, draining_job
from tests.support.training.in_place_drill import SCRIPT, Drill
from tests.support.training.job import RunJob
from tests.support.training.local import LOSES, PACED, Start, sizes
from tests.support.training.pods import ROOT

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
        a_row_of_drains(job, 5)
        assert job.round.closed == ""


def test_a_world_changes_in_place(run_job: RunJob, embedded: list[str], version: str) -> None:
    python = python_with_torch(version)
    with run_job(
        embedded,
        least=1,
        most=4,
        wrapped=True,
        python=python,
        script=SCRIPT,
        sidecar_environ={"MUSTER_GRACE_S": "90"},
    ) as job:
        drill = Drill(job, seed=1)
        drill.begin(3)
        for kind in ("drain", "join", "node", "join", "worker", "torchrun"):
            outcome = drill.change(kind, rank_0=True)
            assert (outcome.fell_back, outcome.restarted) == ("", ()), str(outcome)
        job.stop_training()
        assert set(job.launchers_end()) == {0}
        drill.check()


def test_all_workers_of_a_drain_a_join_and_a_kill_start_warm(
    start: Start, tmp_path: Path, version: str
) -> None:
    logs, torchrun = tmp_path / "logs", Path(python_with_torch(version)).parent / "torchrun"
    steps = str(ROOT / "examples" / "torch_steps.py")
    job = start(
        *(*LOSES, "--warm", "--nodes", "2", "--min", "1", "--max", "2", "--log-dir", str(logs)),
        *("--event", "drain:rank0@world2+1s", "--event", "add@world1+1s"),
        *("--event", "kill:rank0@world2+1s", "--"),
        *(str(torchrun), PACED, steps, "--steps", "1000"),
    )
    job.hurry_after([2, 1, 2, 1])
    assert job.status() == 0, job.said
    assert sizes(job.timeline()) == [2, 1, 2, 1], job.said
    said = [path.read_text() for path in logs.glob("*/torchrun.log")]
    assert said
    assert not [text for text in said if "starts without the zygote" in text]
