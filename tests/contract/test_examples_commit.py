# SPDX-License-Identifier: Apache-2.0
"""The examples beside a gate moved by hand: saved where told, and gone on with from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import muster
from rdzv.drain.gate import Gate
from rdzv.records.commit import LastCommit
from tests.support.ports import free_ports
from tests.support.sidecars.pod_gate import PodGate

ROOT = Path(muster.__file__).parents[1]
START_S = 100.0
"""For torch to be imported, on cores that are shared."""

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


@contextmanager
def training(pod: PodGate, example: str, length: str) -> Iterator[subprocess.Popen[str]]:
    """Run an example as the only worker of the round that the pod's gate is of."""
    address, _, port = pod.gate.master.partition(":")
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "MUSTER_RUN_DIR": str(pod.run_dir),
        "CHECKPOINT_DIR": str(pod.run_dir / "shared"),
        "TORCHELASTIC_RUN_ID": "job",
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / example), "--step-ms=20", length],
        env=environ,
        cwd=pod.run_dir,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("example", "length", "steps_each"),
    [
        ("torch_steps.py", "--steps", 1),
        ("torch_digits.py", "--epochs", 11),
        ("torch_dcp.py", "--steps", 1),
    ],
)
def test_an_example_goes_on_from_the_step_that_all_have_saved(
    tmp_path: Path, example: str, length: str, steps_each: int
) -> None:
    # ``steps_each`` is how many steps one of ``length`` has.
    rounds = [f"127.0.0.1:{port}" for port in free_ports(2)]
    pod = PodGate(tmp_path, rounds[0])
    idle = Gate(run="job", round=0, master=rounds[0])
    pod.show(idle)
    # So long that it does not end by itself, however late this machine comes to end it.
    with training(pod, example, f"{length}=1000000") as process:
        pod.until(lambda told: told.step >= 3, timeout_s=START_S)
        pod.show(replace(idle, epoch=1, phase="hold"))
        pod.until(lambda told: told.held, timeout_s=START_S)
        step = pod.told().step + 2
        pod.show(replace(idle, epoch=1, phase="commit", step=step))
        pod.until(lambda told: told.acked == (1, step), timeout_s=START_S)
        process.terminate()
        assert process.wait(START_S) == -signal.SIGTERM
    last = LastCommit(step, 0, 1)
    pod.show(replace(idle, round=1, master=rounds[1], epoch=1, last_commit=last))
    with training(pod, example, f"{length}={(step + 80) // steps_each}") as process:
        said, _ = process.communicate(timeout=START_S)
    assert process.returncode == 0
    assert f"starts at step {step}\n" in said


@pytest.mark.parametrize("example", ["torch_steps.py", "torch_digits.py", "torch_dcp.py"])
def test_an_example_that_finds_an_empty_directory_trains_in_a_new_life_alone(
    tmp_path: Path, example: str
) -> None:
    length = "--epochs" if example == "torch_digits.py" else "--steps"
    for life, port in zip(("former", "present"), free_ports(2), strict=True):
        master = f"127.0.0.1:{port}"
        pod = PodGate(tmp_path / life, master)
        last = LastCommit(60, 0, 1)
        former = life == "former"
        pod.show(Gate(run="job", master=master, last_commit=last, of_former_life=former))
        with training(pod, example, f"{length}=1") as process:
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
