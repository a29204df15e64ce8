# SPDX-License-Identifier: Apache-2.0
"""Real worlds that change in the middle of an epoch: which samples the final weights have seen.

Read from what each rank has logged itself, and beside a run that nothing disturbs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.ports import free_ports
from tests.support.training.local import LOSES, PACED, LocalJob, Start, moments
from tests.support.training.pods import ROOT
from tests.support.training.sample_log import Account, account
from tests.support.training.shard_history import repeated_and_lost

pytestmark = [pytest.mark.torch, pytest.mark.timeout(3600)]

SCRIPTS = ROOT / "tests" / "support" / "scripts"
BATCH = 24

FEW = ("drain:rank0@world2+1s", "add@world1+1s", "kill:rank0@world2+4s")
"""A drain, a newcomer, a loss that takes the steps back since the newcomer was let in."""
PACE = "1.5"
"""Seconds a step, so that there are steps enough for all that happens on a slow machine."""
RECORDS = 60
"""Handed out in shards beside the samples: there are steps enough for one rank to train all."""

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


@contextmanager
def undisturbed(directory: Path, script: Path, *arguments: str) -> Iterator[Callable[[], Account]]:
    """The same training in a world of one, meanwhile; what is given waits for its end."""
    logs = directory / "undisturbed"
    environ = {
        **os.environ,
        "CHECKPOINT_DIR": str(directory / "undisturbed-checkpoints"),
        "DATA_LOGS": str(logs),
        "STEP_S": "0",
        "PYTHONPATH": str(ROOT),
    }
    (directory / "undisturbed-checkpoints").mkdir()
    environ.pop("MUSTER_RUN_DIR", None)
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    (port,) = free_ports(1)
    environ |= world | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (directory / "undisturbed-said").open("w+") as said:
        training = subprocess.Popen(
            [sys.executable, str(script), *arguments], env=environ, stdout=said, stderr=said
        )

        def ended() -> Account:
            assert training.wait(600) == 0, Path(said.name).read_text()
            return account(logs)

        try:
            yield ended
        finally:
            training.kill()
            training.wait()


def disturbed(
    start: Start, monkeypatch: pytest.MonkeyPatch, directory: Path, events: tuple[str, ...],
    script: Path, *arguments: str, pace: str = "",
) -> tuple[LocalJob, Account]:  # fmt: skip
    """Train while nodes come and go, from two nodes on; ``pace``: seconds a step, until then."""
    monkeypatch.setenv("DATA_LOGS", str(directory / "sample-logs"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    # Long enough for the last of many nodes to come: a world trains on while one starts.
    monkeypatch.setenv("STEP_S", pace or (PACE if len(events) < 10 else "1"))
    if events == FEW and not pace:
        monkeypatch.setenv("SAVE_EVERY", "1000")  # else it may be saved just before the kill
    asked = [word for event in events for word in ("--event", event)]
    job = start(
        *(*LOSES, "--nodes", "2", "--min", "1", "--max", "4", *asked),
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
        *(
            pytest.param(f"data_train.py {kind}", FEW, 1_000, id=f"{said}", marks=pytest.mark.long)
            for kind, said in (
                ("ddp", "muster.train"),
                ("fsdp", "muster.train, FSDP2"),
                ("own", "FSDP2 and DCP in an own loop"),
                ("accelerate", "muster.train, accelerate"),
            )
        ),
    ],
)
def test_i12_each_sample_is_in_the_final_weights_once_an_epoch(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    script: str, events: tuple[str, ...], samples: int,
) -> None:  # fmt: skip
    steps = -(-samples // BATCH) * 3 // 2
    script, _, kind = script.partition(" ")
    arguments = (kind or "muster", str(samples), str(steps))
    path = SCRIPTS / script
    with undisturbed(tmp_path, path, *arguments) as ended:
        if script == "data_loop.py" and events == FEW:
            monkeypatch.setenv("SHARDS_RECORDS", str(RECORDS))
        job, trained = disturbed(start, monkeypatch, tmp_path, events, path, *arguments)
        calm = ended()
    assert_each_once(calm, samples, steps)
    assert len(trained.worlds) >= len(events), job.said
    assert trained.again > 0, "nothing was rolled back"
    if events == FEW:
        timeline = job.timeline()
        (killed,) = moments(timeline, "kill")
        assert killed["detail"].startswith("it hosts rank 0")
        # Whoever stalls for a lease is lost, too.
        assert killed["who"] in [one["who"] for one in moments(timeline, "lost")]
        assert moments(timeline, "restart") == []
        assert (job.report / "world.svg").read_text().startswith("<svg")
    assert_each_once(trained, samples, steps)
    assert_same_losses(trained, calm)
    if script == "data_loop.py" and events == FEW:
        assert repeated_and_lost(tmp_path / "sample-logs", RECORDS, 1) == ([], [])


@pytest.mark.long
def test_i12_a_loader_with_a_state_of_its_own_is_exact(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two workers read ahead; rank 0's state is loaded on all ranks, as by habit."""
    monkeypatch.setenv("STATEFUL", "1")
    monkeypatch.setenv("WORKERS", "2")
    steps = -(-1_000 // BATCH) * 3 // 2
    script = SCRIPTS / "data_loop.py"
    job, trained = disturbed(
        start, monkeypatch, tmp_path, FEW, script, "muster", "1000", str(steps)
    )
    assert len(trained.worlds) >= len(FEW), job.said
    assert trained.again > 0, "nothing was rolled back"
    assert_each_once(trained, 1_000, steps)


@pytest.mark.long
def test_i12_data_that_grows_between_worlds_and_within_them_is_exact(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two epochs; each world finds more rows than the one before, and more come as it trains."""
    monkeypatch.setenv("GROWS", "30")
    script = SCRIPTS / "data_loop.py"
    job, trained = disturbed(start, monkeypatch, tmp_path, FEW, script, "muster", "600", "1000000")
    assert len(trained.worlds) >= len(FEW), job.said
    assert trained.again > 0, "nothing was rolled back"
    epochs: list[set[int]] = [set()]
    for step in trained.steps:
        if not epochs[-1].isdisjoint(step.samples):
            epochs.append(set())
        assert len(set(step.samples)) == len(step.samples)
        epochs[-1].update(step.samples)
    first, second = epochs
    assert [first, second] == [set(range(len(first))), set(range(len(second)))]
    assert 600 < len(first) < len(second)


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
