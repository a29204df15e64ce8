# SPDX-License-Identifier: Apache-2.0
"""Real launchers that train shards, while nodes of different pace are killed, drained and come.

Each day ``test_samples.py`` trains some shards beside its samples.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.horovod.cluster import horovod_folder
from tests.support.training.local import LOSES, Start, sizes, start
from tests.support.training.pods import ROOT
from tests.support.training.shard_history import records_by_node, repeated_and_lost, worlds

__all__ = ["start"]

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900), pytest.mark.long]

SCRIPT = str(ROOT / "tests" / "support" / "scripts" / "shards_loop.py")


@pytest.mark.parametrize(
    ("nodes", "records", "epochs", "events", "seen"),
    [
        pytest.param(
            *(4, 24_000, 1),
            ("kill:node-1@world4+4s", "kill:node-2@world3+4s", "add@world2+4s"),
            [4, 3, 2, 3],
            id="two of four are killed, one after the other, and one comes",
        ),
        pytest.param(
            *(3, 6_000, 2),
            ("kill-sidecar:node-1@world3+1s", "drain:rank0@world3+4s", "kill:rank0@world2+4s"),
            [3, 2, 1],
            id="a sidecar is killed, rank 0 is drained, then rank 0 is killed, over two epochs",
        ),
    ],
)
def test_each_record_is_once_an_epoch_in_the_final_weights(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    records: int,
    epochs: int,
    events: tuple[str, ...],
    seen: list[int],
) -> None:
    monkeypatch.setenv("SHARDS_RECORDS", str(records))
    monkeypatch.setenv("SHARDS_EPOCHS", str(epochs))
    monkeypatch.setenv("SHARDS_SLOW", "node-0")
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    bounds = ("--nodes", str(nodes), "--min", "1", "--max", str(nodes))
    asked = [word for event in events for word in ("--event", event)]
    job = start(*LOSES, *bounds, *asked, "--", "torchrun", SCRIPT)
    assert job.status(600) == 0, job.said
    assert sizes(job.timeline()) == seen
    assert len(worlds(directory)[0]) == nodes
    assert repeated_and_lost(directory, records, epochs) == ([], [])
    trained = records_by_node(directory)
    others = [trained[f"node-{number}"] for number in range(1, nodes)]
    if nodes == 4:
        assert trained["node-0"] < max(others)


def test_horovod_goes_on_from_the_state_that_it_restores(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDS_RECORDS", "6000")
    # It is killed after the others' step, and most likely before it has told of it.
    monkeypatch.setenv("SHARDS_LATE", "node-1")
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    folder = horovod_folder()
    job = start(
        *(*LOSES, "--nodes", "3", "--min", "1", "--max", "3"),
        *("--event", "kill:node-1@world3+4s", "--event", "add@world2+4s"),
        *("--", f"{folder}/horovodrun", "--gloo-timeout-seconds", "120"),
        *(f"{folder}/python", str(ROOT / "tests" / "support" / "scripts" / "horovod_shards.py")),
    )
    assert job.status(600) == 0, job.said
    assert repeated_and_lost(directory, 6000, 1) == ([], [])
    assert [len(logs) for logs in worlds(directory)] == [3, 2, 3]
