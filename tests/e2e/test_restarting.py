# SPDX-License-Identifier: Apache-2.0
"""Real torchrun jobs whose workers are killed again and again, or leave processes behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.sources import ROOT
from tests.support.training.job import RunJob, account_of, draining_job
from tests.support.training.step_log import World

pytestmark = [pytest.mark.torch, pytest.mark.timeout(1800)]

STEPS = 20
"""After so many, a torchrun is started again."""

long = pytest.mark.long


@pytest.mark.parametrize(
    ("nodes", "least", "kills"),
    [
        pytest.param(1, 1, 3, id="alone"),
        pytest.param(2, 2, 4, id="both are needed", marks=long),
        pytest.param(2, 1, 10, id="one would be enough", marks=long),
        pytest.param(2, 2, 50, id="50 in a row", marks=long),
    ],
)
def test_workers_that_are_killed_in_a_row_end_no_job_that_makes_progress(
    run_job: RunJob, embedded: list[str], nodes: int, least: int, kills: int
) -> None:
    with draining_job(
        run_job,
        embedded,
        least=least,
        most=nodes,
        max_restarts=1,
        script_environ={"DRAIN_LOOP_EVERY": "5"},
        sidecar_environ={"MUSTER_RESTART_STEPS": f"{STEPS}"},
    ) as job:
        job.add(nodes)
        world: World | None = None
        for turn in range(kills):
            world = job.world_of(job.nodes.values(), not_=world)
            job.goes_on(world, 2 * STEPS)
            job.tell(f"kill -9, the {turn + 1}th")
            os.kill(world.workers[turn % nodes].pid, signal.SIGKILL)
        job.goes_on(job.world_of(job.nodes.values(), not_=world))
        job.stop_training()
        assert job.launchers_end() == [0] * nodes
        assert account_of(job.steps.directory).lost == []
        job.never_two_worlds()
        logs = [node.launcher_log() for node in job.nodes.values()]
        assert all(log.count("it is started again") >= max(1, kills // 4) for log in logs)


SCRIPT = ROOT / "tests" / "support" / "scripts" / "leaving_tracker.py"


def test_a_survivor_keeps_no_process_of_the_world_before(
    run_job: RunJob, embedded: list[str], tmp_path: Path
) -> None:
    environ = {"TRACKERS": str(tmp_path)}
    with run_job(
        embedded, least=1, most=2, wrapped=True, script=SCRIPT, script_environ=environ
    ) as job:
        staying, leaving = job.add(2, launch=False)
        beside = f"sleep 8888 & echo $! > {tmp_path}/beside; {{}}"
        job.start_launcher(staying, shell=beside)
        job.start_launcher(leaving)
        both = job.world_of([staying, leaving])
        (tracker,) = tmp_path.glob(f"{staying.name}.*")
        job.stop_node(leaving)
        alone = job.world_of([staying], not_=both)
        job.goes_on(alone)
        assert not (tmp_path / "met").exists()
        assert not Path(f"/proc/{tracker.suffix[1:]}").exists()
        alive = [
            p for p in tmp_path.glob(f"{staying.name}.*") if Path(f"/proc/{p.suffix[1:]}").exists()
        ]
        assert len(alive) == 1
        assert Path(f"/proc/{(tmp_path / 'beside').read_text().strip()}").exists()
        job.stop_training()
        assert job.launchers_end() == [0]
