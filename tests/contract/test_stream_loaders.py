# SPDX-License-Identifier: Apache-2.0
"""The sampler and the streams below torch's loaders, whose workers read ahead of training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from torch.utils.data import DataLoader

from muster.data import ElasticSampler, ElasticStream, ShardStream, elastic_stream, shard_stream
from tests.support.training.pods import ROOT
from tests.support.training.streamed import Streamed
from tests.support.training.worker import forks

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # of torchdata
]

LENGTHS = [30, 0, 55, 7, 61, 1, 40, 12]
EVERYTHING = Counter((at, one) for at, many in enumerate(LENGTHS) for one in range(many))
Make = Callable[[ElasticStream, int], Any]


def plain(stream: ElasticStream, workers: int) -> Any:
    return DataLoader(stream, batch_size=None, num_workers=workers)


def pickled(stream: ElasticStream, workers: int) -> Any:
    """Its workers are given the stream as spawned ones are, by a server that has torch already."""
    return DataLoader(stream, batch_size=None, num_workers=workers, multiprocessing_context=forks())


def stateful(stream: ElasticStream, workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(stream, batch_size=None, num_workers=workers)


def trained(batches: Any) -> Counter[Any]:
    return Counter(tuple(record) for batch in batches for record in batch)


def world(ranks: int, folder: Path | None) -> list[ElasticStream]:
    streams = []
    for rank in range(ranks):
        dataset = Streamed(LENGTHS)
        stream = elastic_stream(dataset, batch_size=4, seed=3, lanes=2, rank=rank, world_size=ranks)
        stream.load(folder)
        streams.append(stream)
    return streams


@pytest.mark.parametrize(
    ("make", "workers"),
    [(plain, 0), (plain, 2), (plain, 1), (pickled, 2), (stateful, 0), (stateful, 2)],
)
def test_i12_what_workers_have_read_ahead_of_a_stream_is_not_trained(
    make: Make, workers: int, tmp_path: Path
) -> None:
    """Worlds of two, one and three ranks; the second is rolled back once."""
    seen: Counter[Any] = Counter()
    folder: Path | None = None
    states: list[Any] = []
    for step, ranks in enumerate((2, 1), 1):
        streams = world(ranks, folder)
        followed: list[Any] = [stream.follow(make(stream, workers)) for stream in streams]
        for batches in followed:
            seen += trained(islice(batches, 5))
        folder = tmp_path / str(step)
        for stream in streams:
            stream.save(folder, step)
        for batches in followed:
            trained(islice(batches, 3))  # and the world is killed
            batches.close()
    for stream in world(3, folder):
        loader = make(stream, workers)
        if states:
            loader.load_state_dict(states[0])
        batches = stream.follow(loader)
        for batch in batches:
            seen += trained([batch])
            if stream.done:
                break
            if make is stateful and not states:
                states.append(loader.state_dict())
    assert seen == EVERYTHING


def test_a_loaders_state_alone_says_no_place_in_a_stream() -> None:
    (stream,) = world(1, None)
    loader = stateful(stream, 0)
    next(stream.follow(loader))
    state = loader.state_dict()
    stream = elastic_stream(Streamed(LENGTHS), batch_size=4, rank=0, world_size=1)
    loader = stateful(stream, 0)
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match=r"call stream\.load\(folder\) before the loop"):
        next(stream.follow(loader))


def test_a_loader_of_something_else_is_refused() -> None:
    (stream,) = world(1, None)
    many: Any = stream
    for loader, said in [
        (DataLoader([1, 2]), "DataLoader does not read this stream"),
        ([[1, 2]], "list does not read this stream"),
        (DataLoader(many, batch_size=4), "the stream makes the batches"),
        (
            DataLoader(many, batch_size=None, num_workers=1, persistent_workers=True),
            "workers that persist do not see",
        ),
    ]:
        with pytest.raises(ValueError, match=said):
            stream.follow(loader)


ROWS, BATCH = 200, 16
RECORDS = [30, 0, 55, 7, 108]


def read(shard: int, start: int, stop: int) -> list[tuple[int, int]]:
    return [(shard, record) for record in range(start, stop)]


def of_rows(rank: int, world: int) -> tuple[ElasticSampler, Any]:
    sampler = ElasticSampler(
        ROWS, 5, global_batch=BATCH, micro_batch=3, rank=rank, world_size=world
    )
    loader: Any = DataLoader(
        range(ROWS), batch_sampler=sampler, num_workers=2, prefetch_factor=3, collate_fn=list
    )
    return sampler, lambda: sampler.follow(loader)


def of_shards(rank: int, world: int) -> tuple[ElasticSampler, Any]:
    stream: ShardStream = shard_stream(
        RECORDS, read, 5, global_batch=BATCH, lanes=4, micro_batch=3, rank=rank, world_size=world
    )
    loader: Any = DataLoader(stream, batch_size=None, num_workers=2, collate_fn=list)
    return stream.sampler, lambda: stream.follow(loader)


@pytest.mark.parametrize(
    ("make", "everything"),
    [
        (of_rows, Counter(range(ROWS))),
        (of_shards, Counter((at, one) for at, many in enumerate(RECORDS) for one in range(many))),
    ],
    ids=["rows", "shards"],
)
def test_i12_what_workers_have_read_ahead_is_not_trained(
    make: Any, everything: Counter[Any]
) -> None:
    """A world of three for four steps, then one of two to the end of the epoch."""
    seen: Counter[Any] = Counter()
    cursors = []
    for rank in range(3):
        sampler, follow = make(rank, 3)
        for batch, part in islice(follow(), 4 * sampler.plan.accumulation):
            seen.update(map(_plain, batch) if part.samples else ())
        cursors.append(sampler.cursor)
    assert cursors[0]["samples"] == 4 * BATCH
    assert cursors == cursors[:1] * 3
    for rank in range(2):
        sampler, follow = make(rank, 2)
        sampler.go_to(cursors[0])
        for batch, part in follow():
            seen.update(map(_plain, batch) if part.samples else ())
        assert (sampler.epoch, sampler.samples) == (1, 0)
    assert seen == everything


def _plain(sample: Any) -> Any:
    return tuple(sample) if isinstance(sample, list) else sample


def test_workers_that_persist_are_refused_by_a_stream() -> None:
    stream = shard_stream(RECORDS, read, global_batch=BATCH, rank=0, world_size=1)
    loader: Any = DataLoader(stream, batch_size=None, num_workers=1, persistent_workers=True)
    with pytest.raises(ValueError, match="persistent_workers"):
        stream.follow(loader)


PRELUDE = """
import json
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
import muster
from tests.support.training.streamed import Streamed

def load_dataset(kind, **given):
    assert given.pop("streaming")
    return Streamed([7, 0, 21, 12])

def tensors(records):
    return torch.tensor(records).reshape(-1, 2)

def train(batch, total):
    assert len(batch) == total
    trained.extend(batch.tolist())

def save(folder):
    with open(f"{folder}/trained.json", "w") as file:
        json.dump(trained, file)

EPOCHS, step, trained = 2, 0, []
dist.init_process_group("gloo", init_method="file://MEETING", rank=0, world_size=1)
"""


def test_the_script_of_the_documentation_trains_each_record_once_an_epoch(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    begins = page.index("    from muster.data import elastic_stream")
    shown = dedent(page[begins : page.index("\n\nEvery rank", begins)])
    assert len(shown.splitlines()) <= 30
    script = PRELUDE.replace("MEETING", str(tmp_path / "meeting")) + shown
    script = script.replace("/checkpoints", str(tmp_path)).replace("step % 500", "step % 1")
    (tmp_path / "script.py").write_text(script)
    environ = {name: value for name, value in os.environ.items() if name != "MUSTER_RUN_DIR"}
    environ |= {"PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": "1"}
    subprocess.run([sys.executable, str(tmp_path / "script.py")], env=environ, check=True)
    kept = [path.parent for path in tmp_path.glob("*/train-00000.json")]
    newest = max(kept, key=lambda folder: int(folder.name.rpartition("-")[2]))
    trained = Counter(map(tuple, json.loads((newest / "trained.json").read_text())))
    lengths = [7, 0, 21, 12]
    everything = [(at, one) for at, many in enumerate(lengths) for one in range(many)]
    assert trained == Counter(dict.fromkeys(everything, 2))
