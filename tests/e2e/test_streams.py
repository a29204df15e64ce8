# SPDX-License-Identifier: Apache-2.0
"""Real worlds that read a stream of shards: which records the final weights have seen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.training.local import LOSES, PACED, Start, moments
from tests.support.training.pods import ROOT
from tests.support.training.shard_history import repeated_and_lost, worlds

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

SCRIPT = str(ROOT / "tests" / "support" / "scripts" / "stream_loop.py")
EVENTS = ("drain:rank0@world2+1s", "add@world1+1s", "kill:rank0@world2+4s")
SIZE, EPOCHS = 253, 2


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        pytest.param("streamed", 2, id="two workers"),
        pytest.param("streamed", 0, id="no worker", marks=pytest.mark.long),
        pytest.param("datasets", 2, id="of datasets", marks=pytest.mark.long),
    ],
)
def test_i12_each_record_of_a_stream_is_in_the_final_weights_once_an_epoch(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, workers: int
) -> None:
    """A drain of rank 0, a newcomer, and a kill that rolls back."""
    paths = [str(ROOT)]
    if kind == "datasets":
        program = ROOT / "scripts" / "toolchain" / "datasets"
        made = subprocess.run(
            [program, sys.executable], stdout=subprocess.PIPE, text=True, check=True
        )
        paths.append(made.stdout.strip())
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths), prepend=os.pathsep)
    monkeypatch.setenv("STEP_S", "1")
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    asked = [word for event in EVENTS for word in ("--event", event)]
    job = start(
        *(*LOSES, "--nodes", "2", "--min", "1", "--max", "3", *asked),
        *("--", "torchrun", PACED, SCRIPT, kind, str(workers), str(EPOCHS)),
    )
    job.hurry_after_changes(len(EVENTS), 600)
    assert job.status(600) == 0, job.said
    assert len(worlds(directory)) > len(EVENTS), job.said
    assert len(moments(job.timeline(), "kill")) == 1
    assert repeated_and_lost(directory, SIZE, EPOCHS) == ([], [])
