# SPDX-License-Identifier: Apache-2.0
"""Warm workers under the real torchrun: a drain and a join, and no worker starts plainly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training.local import LOSES, PACED, Start, moments, sizes
from tests.support.training.pods import ROOT

STEPS = str(ROOT / "examples" / "torch_steps.py")
PLAIN = "starts without the zygote"

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


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
