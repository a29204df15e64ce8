# SPDX-License-Identifier: Apache-2.0
"""The callbacks within the real libraries: saved where told, parked, gone on with, none twice."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from agent.rundir.reports import read_line
from muster.resuming import mark, marked, world_tag
from rdzv.drain.gate import Gate
from rdzv.records.drain import LastCommit
from tests.support.sidecars.pod_gate import PodGate
from tests.support.training.worker import SCRIPTS, START_S, worker

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

MORE_STEPS = 100
"""What the next world trains from where the one before it ended."""

ENDLESS = "1000000"
"""Steps of a run that is ended on the way."""

MASTER, NEXT_MASTER = "10.0.0.7:40123", "10.0.0.8:40999"
TAG = world_tag("job", 0, MASTER)


def counted(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()]


@pytest.mark.parametrize(
    ("script", "checkpoint"),
    [
        ("transformers_loop.py", "checkpoint-{}/trainer_state.json"),
        ("lightning_loop.py", f"muster-{{}}-{TAG}.ckpt"),
    ],
)
def test_a_trainer_saves_parks_and_goes_on_from_there(
    tmp_path: Path, script: str, checkpoint: str
) -> None:
    files = checkpoints, log = tmp_path / "checkpoints", tmp_path / "log"
    pod = PodGate(tmp_path / "pod", MASTER)
    idle = Gate(run="job", round=0, master=MASTER)
    pod.show(idle)
    loop = SCRIPTS / script
    with worker(loop, *files, ENDLESS, run_dir=pod.run_dir, master=MASTER) as process:
        # A first attempt comes to nothing: what was saved does not count, training goes on.
        pod.until(lambda told: told.step >= 3, timeout_s=START_S)
        pod.show(replace(idle, epoch=1, phase="hold"))
        pod.until(lambda told: told.held)
        first = pod.told().step + 2
        pod.show(replace(idle, epoch=1, phase="commit", step=first))
        pod.until(lambda told: told.acked == (1, first))
        assert (checkpoints / checkpoint.format(first)).exists()
        assert counted(log) == list(range(1, first + 1)), "boundaries are optimizer steps"
        pod.show(replace(idle, epoch=1, phase="void"))
        # A second one succeeds, and SIGTERM ends a parked rank whatever handler it has.
        pod.until(lambda told: told.step > first)
        pod.show(replace(idle, epoch=2, phase="hold"))
        pod.until(lambda told: told.held)
        step = pod.told().step + 5
        pod.show(replace(idle, epoch=2, phase="commit", step=step))
        pod.until(lambda told: told.acked == (2, step))
        last = LastCommit(step, 0, 2, tag=pod.told().tag)
        pod.show(replace(idle, epoch=2, phase="done", step=step, last_commit=last))
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_S) == -signal.SIGTERM
    assert counted(log) == list(range(1, step + 1))
    # The next world goes on from there, also past what a save that was killed has left.
    steps = step + MORE_STEPS
    (checkpoints / f"checkpoint-{steps - 1}").mkdir()
    (checkpoints / "late.ckpt").mkdir()
    pod.show(replace(idle, round=1, master=NEXT_MASTER, epoch=2, last_commit=last))
    with worker(loop, *files, str(steps), run_dir=pod.run_dir, master=NEXT_MASTER) as process:
        _, complaints = process.communicate(timeout=START_S)
        assert process.returncode == 0, complaints
    assert counted(log) == list(range(1, steps + 1)), "no step is lost, none is trained twice"
    told = read_line(pod.run_dir / "progress" / "0.json")
    assert told is not None
    assert (told.step, told.drain) == (steps, False)


@pytest.mark.parametrize(
    ("script", "checkpoint"),
    [
        ("transformers_loop.py", "checkpoint-{}/trainer_state.json"),
        ("lightning_loop.py", "*step={}.ckpt"),
    ],
)
def test_what_a_trainer_saves_by_itself_is_told_once_it_is_there(
    tmp_path: Path, script: str, checkpoint: str
) -> None:
    pod = PodGate(tmp_path / "pod", MASTER)
    pod.show(Gate(run="job", round=0, master=MASTER))
    files = checkpoints, _ = tmp_path / "checkpoints", tmp_path / "log"
    loop = SCRIPTS / script
    with worker(loop, *files, ENDLESS, run_dir=pod.run_dir, master=MASTER, SAVE_STEPS="5"):
        pod.until(lambda told: told.saved and told.saved[0] >= 10, timeout_s=START_S)
        told = pod.told()
        assert [step % 5 for step in told.saved] == [0] * len(told.saved)
        assert told.saved[0] <= told.step
        for step in told.saved:
            assert list(checkpoints.glob(checkpoint.format(step))), f"step {step} is not there"


@pytest.mark.parametrize("script", ["transformers_loop.py", "lightning_loop.py"])
def test_i1_a_trainer_that_was_cut_off_stops_at_its_next_save(tmp_path: Path, script: str) -> None:
    pod = PodGate(tmp_path / "pod", MASTER)
    pod.show(Gate(run="job", round=0, master=MASTER))
    files = checkpoints, _ = tmp_path / "checkpoints", tmp_path / "log"
    loop = SCRIPTS / script
    with worker(loop, *files, ENDLESS, run_dir=pod.run_dir, master=MASTER, SAVE_STEPS="5") as rank:
        pod.until(lambda told: told.saved, timeout_s=START_S)
        assert (marked(str(checkpoints)), pod.told().tag) == (TAG, TAG)
        mark(str(checkpoints), world_tag("job", 1, NEXT_MASTER))
        _, complaints = rank.communicate(timeout=START_S)
        assert rank.returncode == 1
    assert "a later world of this job saves to" in complaints


@pytest.mark.parametrize("how", ["with", pytest.param("without", marks=pytest.mark.long)])
def test_a_second_trainer_trains_after_one_that_raised(tmp_path: Path, how: str) -> None:
    pod = PodGate(tmp_path / "run")
    pod.show(pod.gate)
    loop = SCRIPTS / "retrying_loop.py"
    with worker(loop, tmp_path / "out", how, run_dir=pod.run_dir) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        told = pod.told()
        assert (told.step, told.drain) == (2, how == "without")
        said, complaints = process.communicate("go on\n", timeout=START_S)
        assert process.returncode == 0, complaints
        assert said.endswith("second\n")
        assert (pod.told().step, pod.told().drain) == (3, False)


@pytest.mark.parametrize(
    ("script", "load"),
    [
        ("transformers_loop.py", "give train() resume_from_checkpoint=last_checkpoint("),
        ("lightning_loop.py", "give fit() ckpt_path=last_checkpoint("),
    ],
)
def test_a_trainer_that_begins_before_the_last_commit_makes_no_step(
    tmp_path: Path, script: str, load: str
) -> None:
    """As without ``resume_from_checkpoint``, or with ``ckpt_path="last"``."""
    pod = PodGate(tmp_path / "pod", MASTER)
    pod.show(Gate(run="job", round=0, master=MASTER, last_commit=LastCommit(50, 0, 1)))
    files = _, log = tmp_path / "checkpoints", tmp_path / "log"
    with worker(SCRIPTS / script, *files, ENDLESS, run_dir=pod.run_dir, master=MASTER) as rank:
        _, complaints = rank.communicate(timeout=START_S)
    assert rank.returncode == 1
    assert "saved step 50, and training begins at step 1" in complaints
    assert "CheckpointMissing: all ranks of this job have" in complaints
    assert load in complaints
    assert not log.exists()
