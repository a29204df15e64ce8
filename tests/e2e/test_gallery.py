# SPDX-License-Identifier: Apache-2.0
"""The examples on two real nodes, one of which is drained: no step is lost or trained twice.

Where an example is not here, another test runs it: ``test_local_job.py``, ``test_horovod_local.py``
and ``tests/contract/test_examples_commit.py``.
"""

from __future__ import annotations

import re

import pytest

from tests.support.training.local import PACED, LocalJob, Start, moments, sizes
from tests.support.training.pods import ROOT

STEPS = 200

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


def starts(job: LocalJob) -> list[str]:
    """What the ranks of all worlds have said of where they start."""
    logs = "".join(path.read_text() for path in job.logs.glob("node-*/torchrun.log"))
    return sorted(re.findall(r"^rank \d of \d starts at step \d+$", logs, re.MULTILINE))


@pytest.mark.parametrize("example", ["lightning_sine.py", "transformers_gpt2.py"])
def test_a_trainer_of_two_nodes_goes_on_from_the_step_that_both_saved(
    start: Start, monkeypatch: pytest.MonkeyPatch, example: str
) -> None:
    monkeypatch.setenv("STEPS", str(STEPS))
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
    assert f"after {STEPS} steps" in job.said
