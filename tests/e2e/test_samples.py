# SPDX-License-Identifier: Apache-2.0
"""Real worlds that change in the middle of an epoch: which samples the final weights have seen.

Read from what each rank has logged itself, and beside a run that nothing disturbs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.training.local import PACED, LocalJob, Start
from tests.support.training.pods import ROOT
from tests.support.training.sample_log import Account, account

pytestmark = [pytest.mark.torch, pytest.mark.timeout(3600)]

SCRIPTS = ROOT / "tests" / "support" / "scripts"
BATCH = 24

FEW = ("kill:rank0@world2+2s", "add@world1+1s", "drain:rank0@world2+2s")
"""A loss with a roll-back, a newcomer, a drain."""

GROWS = ("add@world1+1s", "add@world2+1s", "add@world3+1s")
MANY = (
    *("add@world2+1s", "add@world3+1s", "kill:rank0@world4+1s", "drain:rank1@world3+1s"),
    *("kill:rank1@world2+1s", *GROWS, "drain:rank0@world4+1s", "kill:rank2@world3+1s"),
    *("add@world2+1s", "drain:rank2@world3+1s", "kill:rank0@world2+1s", *GROWS),
    *("kill:rank3@world4+1s", "kill:rank0@world3+1s", "add@world2+1s", "add@world3+1s"),
    *("drain:rank3@world4+1s", "drain:rank0@world3+1s", "drain:rank1@world2+1s", *GROWS),
    *("kill:rank1@world4+1s", "drain:rank2@world3+1s", "kill:rank0@world2+1s", "add@world1+1s"),
)
"""30 changes in worlds of one to four."""


def undisturbed(directory: Path, script: Path, *arguments: str) -> Account:
    """The same training in a world of one."""
    logs = directory / "undisturbed"
    environ = {
        **os.environ,
        "CHECKPOINT_DIR": str(directory / "undisturbed-checkpoints"),
        "DATA_LOGS": str(logs),
        "STEP_S": "0",
        "PYTHONPATH": str(ROOT),
    }
    (directory / "undisturbed-checkpoints").mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"]
    environ.pop("MUSTER_RUN_DIR", None)
    ended = subprocess.run(
        [*torchrun, str(script), *arguments],
        env=environ, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return account(logs)


def disturbed(
    start: Start, monkeypatch: pytest.MonkeyPatch, directory: Path, events: tuple[str, ...],
    script: Path, *arguments: str, pace: str = "",
) -> tuple[LocalJob, Account]:  # fmt: skip
    """Train while nodes come and go, from two nodes on; ``pace``: seconds a step, until then."""
    monkeypatch.setenv("DATA_LOGS", str(directory / "sample-logs"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # Long enough for the last of many nodes to come: a world trains on while one starts.
    monkeypatch.setenv("STEP_S", pace or ("0.3" if len(events) < 10 else "1"))
    asked = [word for event in events for word in ("--event", event)]
    job = start(
        *("--nodes", "2", "--min", "1", "--max", "4", *asked),
        *("--", "torchrun", PACED, str(script), *arguments),
    )
    job.hurry_after_changes(len(events), 2400)
    assert job.status(600) == 0, job.said
    return job, account(directory / "sample-logs")


def assert_each_once(trained: Account, samples: int, steps: int) -> None:
    per_epoch = -(-samples // BATCH)
    assert len(trained.steps) == steps
    for epoch in range(steps // per_epoch):
        assert trained.of_epoch(epoch, per_epoch) == Counter(range(samples))
    half = trained.of_epoch(steps // per_epoch, per_epoch)
    assert set(half.values()) <= {1}


def assert_same_losses(trained: Account, undisturbed: Account) -> None:
    for step, (one, other) in enumerate(zip(trained.steps, undisturbed.steps, strict=True), 1):
        assert sorted(one.samples) == sorted(other.samples), f"step {step}"
        assert one.loss == pytest.approx(other.loss, rel=1e-5), f"step {step}"


@pytest.mark.parametrize(
    ("script", "events", "samples"),
    [
        pytest.param("data_loop.py", FEW, 1_000, id="few changes"),
        pytest.param("data_loop.py", MANY, 12_000, id="30 changes", marks=pytest.mark.long),
        pytest.param("data_transformers.py", FEW, 1_000, id="transformers", marks=pytest.mark.long),
        pytest.param("data_lightning.py", FEW, 1_000, id="Lightning", marks=pytest.mark.long),
    ],
)
def test_i12_each_sample_is_in_the_final_weights_once_an_epoch(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    script: str, events: tuple[str, ...], samples: int,
) -> None:  # fmt: skip
    steps = -(-samples // BATCH) * 3 // 2
    arguments = ("muster", str(samples), str(steps))
    path = SCRIPTS / script
    calm = undisturbed(tmp_path, path, *arguments)
    assert_each_once(calm, samples, steps)
    job, trained = disturbed(start, monkeypatch, tmp_path, events, path, *arguments)
    assert len(trained.worlds) >= len(events), job.said
    assert trained.again > 0, "nothing was rolled back"
    assert_each_once(trained, samples, steps)
    assert_same_losses(trained, calm)


@pytest.mark.long
@pytest.mark.parametrize("script", ["data_loop.py", "data_transformers.py", "data_lightning.py"])
def test_without_it_samples_are_lost_and_repeated(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str
) -> None:
    """The same drill over one epoch, as the libraries count it by themselves."""
    path = SCRIPTS / script
    # There are no more steps than those of the epoch, and they have to last for all changes.
    arguments = ("plain", "1000", "1000000")
    _, trained = disturbed(start, monkeypatch, tmp_path, FEW, path, *arguments, pace="4")
    seen = Counter(sample for step in trained.steps for sample in step.samples)
    never, once = 1000 - len(seen), sum(1 for many in seen.values() if many == 1)
    told = f"{script}: never {never}, once {once}, more often {1000 - never - once}"
    (tmp_path / "account").write_text(f"{told}; worlds {trained.worlds}, {trained.again} again\n")
    assert once < 990, told
