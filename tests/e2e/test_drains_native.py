# SPDX-License-Identifier: Apache-2.0
"""The same notice under torch's own rendezvous, and under Muster in ``muster local``: beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.training.drain_job import SCRIPT, account_of
from tests.support.training.job import ROOT
from tests.support.training.step_log import StepLog

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(700)]

STEPS, DRAIN_AFTER_S, PATIENCE_S = 20, 20, 240.0


def trains_on_as_two(steps: StepLog) -> bool:
    """Whether, after a world of three, one of two has made some steps."""
    worlds = steps.worlds()
    sizes = [world.size for world in worlds]
    return 3 in sizes and sizes[-1] == 2 and len(worlds[-1].steps_s) >= STEPS


def drained_locally(directory: Path, *arguments: str) -> tuple[list[int], int, float]:
    """Train on three nodes with a checkpoint every 20 steps; one gets a SIGTERM.

    Returns the steps that were trained twice, the restarts that were burnt, and how long no step
    was made.
    """
    steps = directory / "steps"
    steps.mkdir(parents=True)
    environ = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("MUSTER_", "PET_"))},
        "OMP_NUM_THREADS": "1",
        "STEP_LOOP_DIR": str(steps),
        "STEP_LOOP_NODE": "one-machine",
        "STEP_LOOP_STOP": str(directory / "stop"),
        "CHECKPOINT_DIR": str(directory / "checkpoints"),
        "DRAIN_LOOP_EVERY": "20",
    }
    command = [
        *(sys.executable, "-m", "console.main", "local", "--nodes", "3", "--min", "2"),
        *("--event", f"drain:node-2@world3+{DRAIN_AFTER_S}s", "--log-dir", str(directory / "logs")),
        *(*arguments, "--", "torchrun", "--max-restarts=9", str(SCRIPT)),
    ]
    with (directory / "local.log").open("wb") as output:
        local = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output)
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while not trains_on_as_two(StepLog(steps)):
            assert time.monotonic() < deadline_s, (directory / "local.log").read_text()[-4000:]
            assert local.poll() is None, (directory / "local.log").read_text()[-4000:]
            time.sleep(0.2)
        (directory / "stop").touch()
        status = local.wait(90)
        assert status == 0, (directory / "local.log").read_text()[-4000:]
    finally:
        if local.poll() is None:
            local.terminate()
            local.wait(30)
    worlds = StepLog(steps).worlds()
    before = [world for world in worlds if world.size == 3][-1]
    after = [world for world in worlds if world.size == 2][-1]
    told = account_of(steps)
    assert told.lost == []
    return told.twice, after.restarts, after.began_s - before.ended_s


def test_native_torchrun_trains_steps_twice_and_burns_a_restart_where_muster_does_not(
    tmp_path: Path,
) -> None:
    twice, restarts, pause_s = drained_locally(tmp_path / "native", "--native")
    ours_twice, ours_restarts, ours_pause_s = drained_locally(tmp_path / "muster")
    seen = (
        f"native: {len(twice)} steps twice, {restarts} restarts, {pause_s:.1f} s;"
        f" muster: {len(ours_twice)}, {ours_restarts}, {ours_pause_s:.1f} s"
    )
    assert (ours_twice, ours_restarts) == ([], 0), seen
    assert twice, seen
    assert restarts == 1, seen
    assert ours_pause_s < pause_s, seen
