# SPDX-License-Identifier: Apache-2.0
"""The examples beside a gate moved by hand: saved where told, and gone on with from there."""

from __future__ import annotations

import signal
import subprocess
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from muster.resuming import world_tag
from rdzv.drain.gate import Gate
from rdzv.records.drain import LastCommit
from tests.support.ports import free_ports
from tests.support.sidecars.pod_gate import PodGate
from tests.support.training.worker import ROOT, START_S, worker

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

EXAMPLES = {"torch_steps.py": 1, "torch_digits.py": 11, "torch_dcp.py": 1}
"""And how many steps one has of what it is told to do."""
MODELS = ("torch_digits.py", "torch_dcp.py")
"""Those of them that train one."""


def training(
    pod: PodGate, example: str, length: int
) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run an example as the only worker of the round that the pod's gate is of."""
    option = "--epochs" if EXAMPLES[example] > 1 else "--steps"
    return worker(
        ROOT / "examples" / example,
        "--step-ms=20",
        f"{option}={length}",
        run_dir=pod.run_dir,
        master=pod.gate.master,
        CHECKPOINT_DIR=str(pod.run_dir / "shared"),
        RANK="0",
        WORLD_SIZE="1",
    )


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_goes_on_from_the_step_that_all_have_saved(tmp_path: Path, example: str) -> None:
    rounds = [f"127.0.0.1:{port}" for port in free_ports(2)]
    pod = PodGate(tmp_path, rounds[0])
    idle = Gate(run="job", round=0, master=rounds[0])
    pod.show(idle)
    # So long that it does not end by itself.
    with training(pod, example, 1_000_000) as process:
        pod.until(lambda told: told.step >= 3)
        pod.show(replace(idle, epoch=1, phase="hold"))
        pod.until(lambda told: told.held)
        step = pod.told().step + 2
        pod.show(replace(idle, epoch=1, phase="commit", step=step))
        pod.until(lambda told: told.acked == (1, step))
        tag = pod.told().tag
        process.terminate()
        assert process.wait(START_S) == -signal.SIGTERM
    assert tag == world_tag("job", 0, rounds[0])
    last = LastCommit(step, 0, 1, tag=tag)
    pod.show(replace(idle, round=1, master=rounds[1], epoch=1, last_commit=last))
    with training(pod, example, (step + 80) // EXAMPLES[example]) as process:
        said, complaints = process.communicate(timeout=START_S)
    assert process.returncode == 0, complaints
    assert f"starts at step {step}\n" in said


@pytest.mark.parametrize("former", [True, False])
@pytest.mark.parametrize(
    "example", ["torch_steps.py", *(pytest.param(one, marks=pytest.mark.long) for one in MODELS)]
)
def test_an_example_that_finds_an_empty_directory_trains_in_a_new_life_alone(
    tmp_path: Path, example: str, former: bool
) -> None:
    (port,) = free_ports(1)
    pod = PodGate(tmp_path, f"127.0.0.1:{port}")
    last = LastCommit(60, 0, 1)
    pod.show(Gate(run="job", master=pod.master, last_commit=last, of_former_life=former))
    with training(pod, example, 1) as process:
        said, complaints = process.communicate(timeout=START_S)
    if former:
        assert process.returncode == 0, complaints
        assert "starts at step 0\n" in said
    else:
        # torch sometimes aborts where an error ends a process that has a group.
        assert process.returncode != 0, said
        (line,) = [one for one in complaints.splitlines() if "CheckpointMissing: " in one]
        assert "all ranks of this job have saved step 60" in line
        assert "or run `muster forget`" in line
