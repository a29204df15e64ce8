# SPDX-License-Identifier: Apache-2.0
"""Ranks that have trained to their end, while a thread of Gloo still frees tensors.

Such a thread needs Python. If it comes once Python has ended, it aborts the process ("terminate
called without an active exception"): torchrun takes the rank for failed, and the world forms again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sources import ROOT

pytestmark = pytest.mark.torch

ENDS = """
import os, sys
import torch
import torch.distributed as dist

torch.set_num_threads(1)
statuses = []
for _ in range(30):
    process = os.fork()
    if not process:
        break
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
else:
    print(*statuses)
    sys.exit()
import muster
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(200):
    dist.all_reduce(torch.ones(10), async_op=True)
"""
"""Many ranks, one after another. Torch and the machine decide whether such a thread comes too late:
without care two in five abort at most, and none of 24 at a load of 18."""


def ran(script: str, run_dir: Path) -> subprocess.CompletedProcess[str]:
    rank = {"TORCHELASTIC_RUN_ID": "job", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "40123"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={"PYTHONPATH": str(ROOT), "MUSTER_RUN_DIR": str(run_dir), **rank},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.long
def test_a_rank_that_ends_well_does_not_abort(tmp_path: Path) -> None:
    done = ran(ENDS, tmp_path)
    assert done.stdout.split() == ["0"] * 30, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("backend", "end", "status", "left"),
    [
        ("gloo", "", 0, True),
        ("gloo", "raise ValueError('no')", 1, False),
        ("gloo", "os.fork() or sys.exit()\nos.wait()", 0, True),
        ("nccl", "", 0, False),
    ],
)
def test_the_group_is_left_once_by_the_rank_itself(
    tmp_path: Path, backend: str, end: str, status: int, left: bool
) -> None:
    script = f"""
import os, sys
import muster
class Group:
    is_initialized = staticmethod(lambda: True)
    get_backend = staticmethod(lambda: {backend!r})
    destroy_process_group = staticmethod(lambda: print("left", flush=True))
sys.modules["torch.distributed"] = Group
{end}
"""
    done = ran(script, tmp_path)
    assert (done.returncode, done.stdout.split()) == (status, ["left"] * left), done.stderr
