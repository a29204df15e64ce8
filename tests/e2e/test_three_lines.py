# SPDX-License-Identifier: Apache-2.0
"""Each trainer's three lines on two real nodes, one of which is drained: no step is lost."""

from __future__ import annotations

import re

import pytest

from tests.e2e.test_gallery import starts
from tests.support.training.local import PACED, Start, moments, sizes
from tests.support.training.pods import ROOT

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "example", ["torch_train.py", pytest.param("accelerate_train.py", marks=pytest.mark.long)]
)
def test_three_lines_lose_no_step(
    start: Start, monkeypatch: pytest.MonkeyPatch, example: str
) -> None:
    monkeypatch.setenv("EPOCHS", "10")  # 640 steps, of a tenth of a second
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
    saved = re.match(r"committed at step (\d+):", released["detail"])
    assert saved is not None, released
    assert starts(job) == [
        f"rank 0 of 1 starts at step {saved[1]}",
        "rank 0 of 2 starts at step 0",
        "rank 1 of 2 starts at step 0",
    ]
    assert "after 640 steps" in job.said
