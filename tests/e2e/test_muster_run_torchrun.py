# SPDX-License-Identifier: Apache-2.0
"""The real torchrun under ``muster-run``: who gets a SIGTERM, and how often."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent.rundir.programs import program
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
