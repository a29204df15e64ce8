# SPDX-License-Identifier: Apache-2.0
"""Worlds whose torchruns count different restarts: one lost a worker, another is new.

Trainers ask for the last checkpoint there, as they do everywhere.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.training.local import LOSES, PACED, Start
from tests.support.training.pods import ROOT
from tests.support.training.sample_log import account, restart_counts

pytestmark = [pytest.mark.torch, pytest.mark.timeout(1200)]

SCRIPTS = ROOT / "tests" / "support" / "scripts"
SAMPLES, STEPS, PER_EPOCH = 240, 20, 10

long = pytest.mark.long


@pytest.mark.parametrize(
    "script",
    # What both ask is in tests/contract/test_choice.py every day.
    ["data_transformers.py", pytest.param("data_lightning.py", marks=long)],
)
@pytest.mark.parametrize(
    ("nodes", "fails", "events"),
    [
        pytest.param(2, "1@7", (), id="a worker fails"),
        pytest.param(3, "", ("kill:rank1@world3+1s", "add@world3+2s"), id="a node is replaced",
                     marks=long),
        pytest.param(3, "1@7 2@17", (), id="two workers fail", marks=long),
    ],
)  # fmt: skip
def test_a_world_with_unequal_restart_counts_trains(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    script: str, nodes: int, fails: str, events: tuple[str, ...],
) -> None:  # fmt: skip
    logs = tmp_path / "sample-logs"
    for name, value in {
        "DATA_LOGS": str(logs),
        "FAILS": fails,
        "PYTHONPATH": str(ROOT),
        "SAVE_EVERY": "5",
        "STEP_S": "1",
    }.items():
        monkeypatch.setenv(name, value)
    asked = [word for event in events for word in ("--event", event)]
    job = start(
        *(*LOSES, "--nodes", f"{nodes}", "--min", f"{nodes}", "--max", f"{nodes}", *asked),
        *("--", "torchrun", "--max-restarts", "9", PACED, str(SCRIPTS / script)),
        *("muster", str(SAMPLES), str(STEPS)),
    )
    job.hurry_after_changes(len(fails.split()) or 1, 600)
    assert job.status(600) == 0, job.said
    trained = account(logs)
    assert len(trained.steps) == STEPS
    for epoch in range(STEPS // PER_EPOCH):
        assert trained.of_epoch(epoch, PER_EPOCH) == Counter(range(SAMPLES))
    if fails:  # those that outlive a node may form the next world before their ranks fail
        assert max(map(len, restart_counts(logs))) > 1, "the torchruns of each world counted alike"
