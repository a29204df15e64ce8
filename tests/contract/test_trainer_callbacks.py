# SPDX-License-Identifier: Apache-2.0
"""The callbacks within the real libraries: saved where told, parked, gone on with, none twice."""

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
from agent.rundir.progress import read_line
from rdzv.drain.gate import Gate
from rdzv.records.commit import LastCommit
from tests.support.sidecars.pod_gate import PodGate

ROOT = Path(muster.__file__).parents[1]
MORE_STEPS = 100
"""What the next world trains from where the one before it ended."""

ENDLESS = 1_000_000
"""Steps of a run that is ended on the way, which a busy machine may come to late."""

MASTER = "10.0.0.7:40123"
START_S = 100.0
"""For a library to be imported, or a step to be trained, on cores that are shared."""


@contextmanager
def training(
    pod: PodGate, script: str, checkpoints: Path, log: Path, steps: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the script as a worker of torchrun's in the round that the pod's gate is of."""
    address, _, port = pod.gate.master.partition(":")
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "MUSTER_RUN_DIR": str(pod.run_dir),
        "TORCHELASTIC_RUN_ID": "job",
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(pod.run_dir),
    }
    with open(pod.run_dir / "output", "ab") as output:
        process = subprocess.Popen(
            [sys.executable, ROOT / "tests" / "contract" / script, checkpoints, log, str(steps)],
            env=environ,
            cwd=pod.run_dir,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def counted(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()]


@pytest.mark.torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "checkpoint"),
    [
        ("transformers_loop.py", "checkpoint-{}/trainer_state.json"),
        ("lightning_loop.py", "muster-{}.ckpt"),
    ],
)
def test_a_trainer_saves_parks_and_goes_on_from_there(
    tmp_path: Path, script: str, checkpoint: str
) -> None:
    checkpoints, log = tmp_path / "checkpoints", tmp_path / "log"
    pod = PodGate(tmp_path / "pod", MASTER)
    idle = Gate(run="job", round=0, master=MASTER)
    pod.show(idle)
    with training(pod, script, checkpoints, log, ENDLESS) as process:
        # A first attempt comes to nothing: what was saved does not count, training goes on.
        pod.until(lambda told: told.step >= 3, timeout_s=START_S)
        pod.show(replace(idle, epoch=1, phase="hold"))
        pod.until(lambda told: told.held, timeout_s=START_S)
        first = pod.told().step + 2
        pod.show(replace(idle, epoch=1, phase="commit", step=first))
        pod.until(lambda told: told.acked == (1, first), timeout_s=START_S)
        assert (checkpoints / checkpoint.format(first)).exists()
        assert counted(log) == list(range(1, first + 1)), "boundaries are optimizer steps"
        pod.show(replace(idle, epoch=1, phase="void"))
        # A second one succeeds, and SIGTERM ends a parked rank whatever handler it has.
        pod.until(lambda told: told.step > first, timeout_s=START_S)
        pod.show(replace(idle, epoch=2, phase="hold"))
        pod.until(lambda told: told.held, timeout_s=START_S)
        step = pod.told().step + 5
        pod.show(replace(idle, epoch=2, phase="commit", step=step))
        pod.until(lambda told: told.acked == (2, step), timeout_s=START_S)
        done = replace(idle, epoch=2, phase="done", step=step, last_commit=LastCommit(step, 0, 2))
        pod.show(done)
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_S) == -signal.SIGTERM
    assert counted(log) == list(range(1, step + 1))
    # The next world goes on from there, also past what a save that was killed has left.
    steps = step + MORE_STEPS
    (checkpoints / f"checkpoint-{steps - 1}").mkdir()
    (checkpoints / "late.ckpt").mkdir()
    pod.show(replace(idle, round=1, master="10.0.0.8:40999", epoch=2, last_commit=done.last_commit))
    with training(pod, script, checkpoints, log, steps) as process:
        assert process.wait(START_S) == 0, (pod.run_dir / "output").read_text()
    assert counted(log) == list(range(1, steps + 1)), "no step is lost, none is trained twice"
    told = read_line(pod.run_dir / "progress" / "0.json")
    assert told is not None
    assert (told.step, told.drain) == (steps, False)
