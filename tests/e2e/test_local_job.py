# SPDX-License-Identifier: Apache-2.0
"""``muster local`` with the real torchrun: what happens to its nodes, and how it ends."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.training.local import PACED, ROOT, LocalJob, moments, sizes, wait_until

STEPS = str(ROOT / "examples" / "torch_steps.py")
WAITING = """
import os, time
import muster
muster.report_step(1, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
time.sleep(3600)
"""

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LocalJob]]:
    jobs: list[LocalJob] = []

    def start_job(*arguments: str) -> LocalJob:
        jobs.append(LocalJob(tmp_path, *arguments))
        return jobs[-1]

    yield start_job
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
        job.status(60)
        job.leaves_nothing(60)


def last_step(job: LocalJob) -> int:
    return int(json.loads(job.checkpoint.read_text())["step"])


@pytest.mark.parametrize("slots", [1, pytest.param(2, marks=pytest.mark.long)])
def test_grows_loses_rank_0_and_gets_it_back(start: Callable[..., LocalJob], slots: int) -> None:
    job = start(
        *("--nodes", "2", "--min", "2", "--max", "3"),
        *("--event", f"add@world{2 * slots}+3s", "--event", f"kill:rank0@world{3 * slots}+5s"),
        *("--event", f"add@world{2 * slots}+3s", "--"),
        *("torchrun", f"--nproc-per-node={slots}", PACED, STEPS, "--steps", "2500"),
    )
    worlds = [size * slots for size in (2, 3, 2, 3)]
    job.hurry_after(worlds)
    assert job.status() == 0, "".join(job.lines)
    timeline = job.timeline()
    assert sizes(timeline) == worlds, "".join(job.lines)
    assert last_step(job) == 2500
    assert moments(timeline, "restart") == []
    (killed,) = moments(timeline, "kill")
    assert killed["detail"].startswith("it hosts rank 0")
    assert killed["who"] == moments(timeline, "add")[1]["who"]
    assert moments(timeline, "lost")[0]["who"] == killed["who"]
    assert (job.report / "world.svg").read_text().startswith("<svg")


def test_a_torchrun_killed_alone_leaves_no_orphans_and_is_restarted(
    start: Callable[..., LocalJob],
) -> None:
    job = start(
        *("--nodes", "2", "--min", "2", "--event", "kill-launcher:node-1@world4+5s"),
        *("--event", "kill-container:node-0@world4+25s", "--"),
        *("torchrun", "--nproc-per-node=2", PACED, STEPS, "--steps", "1000"),
    )
    job.told("first step")
    workers = job.processes("MUSTER_MEMBER=node-1", "LOCAL_WORLD_SIZE=2")
    assert len(workers) >= 2
    job.told("kill-launcher")
    wait_until(
        lambda: not workers & job.processes("MUSTER_MEMBER=node-1", "LOCAL_WORLD_SIZE=2"),
        60,
        "the orphans end",
    )
    job.hurry_after([4], since="kill-container")
    assert job.status() == 0, "".join(job.lines)
    assert last_step(job) == 1000
    assert len(moments(job.timeline(), "restart")) == 2
    assert sizes(job.timeline())[-1] == 4


def test_a_frozen_node_is_left_out_and_comes_back(start: Callable[..., LocalJob]) -> None:
    job = start(
        *("--nodes", "3", "--event", "stop:node-1@world3+3s"),
        *("--event", "cont:node-1@world2+5s", "--"),
        *("torchrun", PACED, STEPS, "--steps", "1200"),
    )
    job.hurry_after([2, 3])
    assert job.status() == 0, "".join(job.lines)
    timeline = job.timeline()
    assert 2 in sizes(timeline)
    assert sizes(timeline)[-1] == 3
    assert last_step(job) == 1200


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_ended_from_outside_it_leaves_no_process_behind(
    start: Callable[..., LocalJob], tmp_path: Path, number: signal.Signals, status: int
) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITING)
    job = start("--nodes", "2", "--", "torchrun", "--nproc-per-node=2", str(script))
    job.told("first step")
    assert len(job.processes()) >= 8
    job.process.send_signal(number)
    assert job.status(120) == status
    job.leaves_nothing(60)


def test_a_script_that_fails_on_one_node_ends_the_job_with_its_launchers_status(
    start: Callable[..., LocalJob], tmp_path: Path
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, time\n"
        "if os.environ['GROUP_RANK'] == '1':\n"
        "    raise SystemExit('this script cannot train')\n"
        "time.sleep(3600)\n"
    )
    job = start("--nodes", "2", "--min", "2", "--restarts", "1", "--", "torchrun", str(script))
    assert job.status() == 1
    assert any("this script cannot train" in line for line in job.lines), "".join(job.lines)
    assert moments(job.timeline(), "training") == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--", "torchrun", "--nnodes=2", "train.py"], "--min and --max of muster local"),
        (["--", "torchrun", "--rdzv-backend=c10d", "train.py"], "the sidecar beside each torchrun"),
        (["--", "horovodrun", "-np", "2", "python", "train.py"], "follows from --nodes, --min"),
        (["--", "mpirun", "-np", "2", "python", "train.py"], "no launcher"),
        (["--min", "3", "--", "torchrun", "t.py"], "--min 3 and --max 2"),
        ([], "no command"),
    ],
)
def test_what_cannot_be_is_refused(
    start: Callable[..., LocalJob], arguments: list[str], sentence: str
) -> None:
    job = start(*arguments)
    assert job.status(60) == 2
    assert sentence in " ".join("".join(job.lines).split())
