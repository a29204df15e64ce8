# SPDX-License-Identifier: Apache-2.0
"""The examples on two real nodes, one of which is drained: no step is lost or trained twice.

The others are run by ``test_local_job.py`` (``torch_steps.py``), ``test_horovod_local.py``, and
``tests/contract/test_trainer_promises.py`` (``torch_digits.py``, and ``torch_dcp.py`` on one node).
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.horovod.cluster import horovod_folder
from tests.support.training.local import PACED, LocalJob, Start, moments, sizes
from tests.support.training.pods import ROOT

STEPS = 600

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


def starts(job: LocalJob) -> list[str]:
    """What the ranks of all worlds have said of where they start."""
    logs = "".join(path.read_text() for path in job.logs.glob("node-*/torchrun.log"))
    return sorted(re.findall(r"^rank \d of \d starts at step \d+$", logs, re.MULTILINE))


@pytest.mark.parametrize(
    ("example", "ends"),
    [
        ("torch_train.py", "after 640 steps"),
        *(
            pytest.param(example, ends, marks=pytest.mark.long)
            for example, ends in (
                ("accelerate_train.py", "after 640 steps"),
                # The callbacks are in tests/contract/test_trainer_callbacks.py every day.
                ("lightning_sine.py", f"after {STEPS} steps"),
                ("transformers_gpt2.py", f"after {STEPS} steps"),
                ("torch_dcp.py", "rank 0 of 1 done at step 1000"),
                ("torch_shards.py", "records since step"),
            )
        ),
    ],
)
def test_two_nodes_save_the_same_step_and_the_next_world_starts_from_it(
    start: Start, monkeypatch: pytest.MonkeyPatch, example: str, ends: str
) -> None:
    monkeypatch.setenv("STEPS", str(STEPS))
    monkeypatch.setenv("EPOCHS", "10")  # of 64 steps
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    job = start(
        *("--nodes", "2", "--strict", "--event", "drain:rank0@world2+1s"),
        *("--", "torchrun", PACED, str(ROOT / "examples" / example)),
    )
    job.hurry_after([2, 1])
    assert job.status() == 0, job.said
    timeline = job.timeline()
    assert sizes(timeline) == [2, 1], job.said
    assert "no step lost" in job.said
    (released,) = moments(timeline, "released")
    assert released["who"] == moments(timeline, "drain")[0]["who"]
    saved = re.match(r"committed at step (\d+):", released["detail"])
    assert saved is not None, released
    assert starts(job) == [
        f"rank 0 of 1 starts at step {saved[1]}",
        "rank 0 of 2 starts at step 0",
        "rank 1 of 2 starts at step 0",
    ]
    assert ends in job.said


@pytest.mark.long
def test_horovods_cursor_goes_on_where_the_committed_state_was(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPOCHS", "2")
    folder = horovod_folder()
    job = start(
        *("--nodes", "2", "--event", "drain:rank0@world2+2s"),
        *("--", f"{folder}/horovodrun", "--gloo-timeout-seconds", "120"),
        *(f"{folder}/python", PACED, str(ROOT / "examples" / "horovod_data.py")),
    )
    job.hurry_after([2, 1])
    assert job.status() == 0, job.said
    logs = "".join(path.read_text() for path in job.logs.rglob("*.log"))
    begins = re.findall(r"rank (\d) of (\d) goes on at (\{.*?\})", logs)
    (later,) = [ast.literal_eval(cursor) for _, size, cursor in begins if size == "1"]
    assert all(ast.literal_eval(c)["samples"] == 0 for _, size, c in begins if size == "2")
    assert later["samples"] > 0
    assert "after 2 epochs" in logs


def test_the_test_for_a_users_own_ci_passes(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    test = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "examples/test_drain.py"]
    ended = subprocess.run(
        [*test, f"--basetemp={tmp_path / 't'}"],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 passed" in ended.stdout
