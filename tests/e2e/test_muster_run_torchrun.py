# SPDX-License-Identifier: Apache-2.0
"""The real torchrun under ``muster-run``: signals, nodes that are lost, warm workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent.rundir.programs import program
from tests.support.training.job import RunJob
from tests.support.training.local import LOSES, PACED, Start, moments, sizes
from tests.support.training.pods import ROOT
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

WORKER = """
import os, signal, sys, time
log = open(sys.argv[1] + "/" + os.environ["RANK"], "a", buffering=1)
def saved(number, frame):
    log.write("got %d\\n" % number)
    time.sleep(1.5)
    log.write("saved\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, saved)
log.write("ready\\n")
while True:
    time.sleep(0.05)
"""


def test_each_worker_gets_a_sigterm_once_and_has_the_time_to_save(tmp_path: Path) -> None:
    wrapper, script = tmp_path / "muster-run", tmp_path / "worker.py"
    wrapper.write_bytes(program("muster-run"))
    wrapper.chmod(0o755)
    script.write_text(WORKER)
    logs = tmp_path / "logs"
    logs.mkdir()
    torchrun = (
        f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 {script} {logs}"
    )
    running = subprocess.Popen(
        [wrapper, "--", "sh", "-c", f"{torchrun}; echo after"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(
            lambda: [path.read_text() for path in logs.iterdir()] == ["ready\n"] * 2,
            150,
            "the workers are ready",
        )
        running.send_signal(signal.SIGTERM)
        assert running.wait(120) in (1, 143)
    finally:
        running.kill()
        running.wait(10)
    told = sorted(path.read_text() for path in logs.iterdir())
    assert told == ["ready\ngot 15\nsaved\n"] * 2


def test_i5_a_sidecar_that_is_killed_alone_costs_no_world_and_i11_a_killed_node_is_evicted(
    run_job: RunJob, embedded: list[str]
) -> None:
    """The node is evicted once its world has failed: no lease ends while the test lasts."""
    with run_job(embedded, least=2, most=3, lease_s=600.0, wrapped=True) as job:
        nodes = job.add(3)
        world = job.world_of(nodes)
        lost, *others = nodes
        job.kill_sidecar(others[0])
        job.goes_on(world, 200)
        job.start_again(others[0])
        job.undisturbed(world)
        assert job.history("lost") == []
        job.kill_node(lost)
        job.goes_on(job.world_of(others, not_=world))
        job.never_two_worlds()
        (entry,) = job.history("lost")
        assert (entry.member, entry.details["early"]) == (lost.name, True)


STEPS = str(ROOT / "examples" / "torch_steps.py")
PLAIN = "starts without the zygote"


def test_all_workers_of_a_drain_and_a_join_start_warm(start: Start, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    job = start(
        *(*LOSES, "--warm", "--nodes", "2", "--min", "1", "--max", "2", "--log-dir", str(logs)),
        *("--event", "drain:rank0@world2+1s", "--event", "add@world1+1s", "--"),
        *("torchrun", PACED, STEPS, "--steps", "1000"),
    )
    job.hurry_after([2, 1, 2])
    assert job.status() == 0, job.said
    timeline = job.timeline()
    assert sizes(timeline) == [2, 1, 2], job.said
    assert moments(timeline, "error") == []
    said = [path.read_text() for path in logs.glob("*/torchrun.log")]
    assert said
    assert not [text for text in said if PLAIN in text]
