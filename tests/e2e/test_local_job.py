# SPDX-License-Identifier: Apache-2.0
"""``muster local`` with the real torchrun: what happens to its nodes, and how it ends.

Each event, signal and end with a make-believe torchrun is in ``test_local_nodes.py``.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.training.local import LOSES, PACED, LocalJob, Start, moments, sizes
from tests.support.training.pods import ROOT

STEPS = str(ROOT / "examples" / "torch_steps.py")
WAITING = """
import os, time
import muster
muster.report_step(1, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
time.sleep(3600)
"""
FAILING = """
import os, pathlib, signal, time
if os.environ["GROUP_RANK"] == "1":
    raise SystemExit("this script cannot train")
def hold(number, frame):
    while not pathlib.Path(__file__).with_name("seen").exists():
        time.sleep(0.02)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
signal.signal(signal.SIGTERM, hold)
time.sleep(3600)
"""
"""The rank beside the one that fails does not let the next round begin before the test does."""

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

long = pytest.mark.long


def last_step(job: LocalJob) -> int:
    saved = job.checkpoints.glob("torch_steps-*.json")
    return max(int(json.loads(path.read_text())["step"]) for path in saved)


@long
@pytest.mark.parametrize("slots", [1, 2])
def test_loses_rank_0_and_gets_it_back(start: Start, slots: int) -> None:
    job = start(
        *(*LOSES, "--nodes", "2", "--min", "1", "--max", "2"),
        *("--event", f"kill:rank0@world{2 * slots}+1s", "--event", f"add@world{slots}+1s", "--"),
        *("torchrun", f"--nproc-per-node={slots}", PACED, STEPS, "--steps", "1000"),
    )
    worlds = [2 * slots, slots, 2 * slots]
    job.hurry_after(worlds)
    assert job.status() == 0, job.said
    timeline = job.timeline()
    assert sizes(timeline) == worlds, job.said
    assert last_step(job) == 1000
    assert moments(timeline, "restart") == []
    (killed,) = moments(timeline, "kill")
    assert killed["detail"].startswith("it hosts rank 0")
    assert killed["who"] == moments(timeline, "add")[0]["who"]
    assert moments(timeline, "lost")[0]["who"] == killed["who"]
    assert (job.report / "world.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGINT, 130, marks=long),
        pytest.param(signal.SIGTERM, 143, marks=long),
        (signal.SIGKILL, -9),
    ],
)
def test_ended_from_outside_it_leaves_no_process_behind(
    start: Start, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITING)
    job = start("--nodes", "1", "--", "torchrun", str(script))
    job.told("in a world of 1")
    assert len(job.processes()) >= 3, "the sidecar, torchrun and its worker"
    job.process.send_signal(number)
    assert job.status(120) == status
    job.leaves_nothing()


@pytest.mark.parametrize(
    ("arguments", "ended"),
    [
        ((), "the same error 3 times before any step: it ended with 1; the last line: this script"),
        pytest.param(("--restarts", "1", "--keep-going"), "ended with 1", marks=long),
    ],
    ids=["given up", "kept going"],
)
def test_a_script_that_fails_on_one_node_ends_the_job_with_its_error(
    start: Start, tmp_path: Path, arguments: tuple[str, ...], ended: str
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILING)
    job = start("--nodes", "2", "--min", "2", *arguments, "--", "torchrun", str(script))
    job.told("this script cannot train (round 0, restart 1 of 10)")
    (tmp_path / "seen").touch()
    assert job.status() == 1
    assert "error      node-" in job.said
    assert ended in moments(job.timeline(), "end")[-1]["detail"]
    assert moments(job.timeline(), "training") == []
