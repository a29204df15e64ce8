# SPDX-License-Identifier: Apache-2.0
"""A stream of shards of unknown length: each record once an epoch, whatever the world does."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.data import ElasticStream, elastic_stream
from muster.data.unsized_stream import IDLE_BATCHES
from tests.support.training.streamed import Streamed

LENGTHS = [30, 0, 55, 7, 108, 1, 40]
EVERYTHING = Counter((at, one) for at, many in enumerate(LENGTHS) for one in range(many))


def stream_of(rank: int = 0, world_size: int = 1, **given: Any) -> ElasticStream:
    chosen = {"batch_size": 8, "seed": 5, **given}
    return elastic_stream(Streamed(LENGTHS), rank=rank, world_size=world_size, **chosen)


class World:
    """All ranks of a world, which take each step together."""

    def __init__(self, ranks: int, folder: Path | None, cursor: Any = None, **given: Any) -> None:
        self.streams = [stream_of(rank, ranks, **given) for rank in range(ranks)]
        for stream in self.streams:
            stream.load(folder, cursor)
        self._batches = [self._of(stream) for stream in self.streams]

    def _of(self, stream: ElasticStream) -> Iterator[Any]:
        while True:
            yield from stream.follow(stream)

    def step(self, seen: Counter[Any]) -> bool:
        """Train one step; return whether it has ended an epoch."""
        for batches in self._batches:
            seen.update(next(batches))
        ends = all(stream.done for stream in self.streams)
        for stream in self.streams if ends else ():
            stream.end_epoch()
        return ends

    def save(self, folder: Path, step: int) -> Any:
        cursors = [stream.save(folder, step) for stream in self.streams]
        assert cursors == cursors[:1] * len(cursors)
        assert len(json.dumps(cursors[0])) < 100
        return cursors[0]


@pytest.mark.parametrize("seed", range(20))
def test_i12_each_record_is_in_the_final_weights_once_an_epoch(seed: int, tmp_path: Path) -> None:
    """Worlds of one to five ranks, saves and steps that are lost, other batches and lanes."""
    drawn = random.Random(seed)
    saved: tuple[Path | None, Any, Counter[Any], int] = (None, None, Counter(), 0)
    step = 0
    while saved[3] < 3:
        folder, cursor, seen, epochs = saved
        given = {"batch_size": drawn.randint(1, 9), "lanes": drawn.randint(1, 3)}
        world = World(drawn.randint(1, 5), folder, cursor, **given)
        seen = seen.copy()
        for _ in range(drawn.randint(0, 12)):
            epochs += world.step(seen)
            step += 1
            if drawn.random() < 0.2:
                folder = tmp_path / str(step)
                saved = folder, world.save(folder, step), seen.copy(), epochs
            if epochs == 3:
                break
    assert seen == Counter(dict.fromkeys(EVERYTHING, 3))


def test_records_of_a_shard_keep_their_order_and_epochs_have_orders_of_their_own() -> None:
    seen: list[list[Any]] = [[], []]
    stream = stream_of(batch_size=1, lanes=2)
    for epoch, order in enumerate(seen):
        assert stream.epoch == epoch
        for batch in stream.follow(stream):
            order += batch
            if stream.done:
                stream.end_epoch()
        for shard in range(len(LENGTHS)):
            assert [one for one in order if one[0] == shard] == sorted(
                one for one in order if one[0] == shard
            )
    assert seen[0] != seen[1]
    plain = stream_of(seed=None, batch_size=500)
    assert next(plain.follow(plain)) == sorted(EVERYTHING)


def test_lanes_mix_shards_and_collate_makes_batches() -> None:
    stream = stream_of(lanes=3, seed=None, collate=lambda records: [at for at, _ in records])
    assert next(stream.follow(stream)) == [0, 2, 0, 3, 2, 0, 3, 2]


def test_a_loop_that_breaks_off_goes_on_where_it_trained() -> None:
    stream, seen = stream_of(), Counter[Any]()
    for batch in stream.follow(stream):
        seen.update(batch)
        break
    former = stream.follow(stream)
    seen.update(next(former))
    for batch in stream.follow(stream):
        seen.update(batch)
        if stream.done:
            break
    assert seen == EVERYTHING
    with pytest.raises(RuntimeError, match="was moved while a loop followed it"):
        next(former)


def test_an_epoch_ends_only_when_it_is_trained(caplog: pytest.LogCaptureFixture) -> None:
    stream = stream_of()
    with pytest.raises(RuntimeError, match="has not trained its part of epoch 0"):
        stream.end_epoch()
    idle = 0
    for batch in stream.follow(stream):
        idle += not batch
        if idle == 2 * IDLE_BATCHES:
            break
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "call stream.end_epoch()" in caplog.text


def saved_by(ranks: int, folder: Path, step: int = 4, **given: Any) -> Any:
    world = World(ranks, None, **given)
    for _ in range(3):
        world.step(Counter())
    return world.save(folder, step)


def test_positions_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    cursor = saved_by(3, tmp_path)
    assert cursor == {"epoch": 0, "step": 4, "ranks": 3, "shards": 7, "seed": 5}
    stream = stream_of()
    stream.load(tmp_path)
    stream.load(tmp_path, cursor)
    with pytest.raises(ValueError, match=r"the commit refers to .*'step': 5.* of .*'step': 4"):
        stream.load(tmp_path, {**cursor, "step": 5})
    with pytest.raises(ValueError, match="give the folder of that commit"):
        stream.load(None, cursor)
    with pytest.raises(ValueError, match="give the data and the seed that training has begun with"):
        stream_of(seed=6).load(tmp_path)
    third = tmp_path / "train-00002.json"
    kept = third.read_text()
    third.write_text((tmp_path / "train-00001.json").read_text())
    with pytest.raises(ValueError, match="the positions of rank 1, not of rank 2"):
        stream.load(tmp_path)
    third.write_text(json.dumps({**json.loads(kept), "tag": "life00002-round000001-0123456789"}))
    with pytest.raises(ValueError, match=r"world of 3 \(life00002.*not of one save"):
        stream.load(tmp_path)
    third.write_text(json.dumps({**json.loads(kept), "begun": {"0": {"records": 1}}}))
    with pytest.raises(ValueError, match="name shards twice"):
        stream.load(tmp_path)
    third.write_text(kept[:20])
    with pytest.raises(ValueError, match="has no positions of a stream"):
        stream.load(tmp_path)
    third.unlink()
    with pytest.raises(ValueError, match=r"train-00002.json is missing: every rank saves"):
        stream.load(tmp_path)
    stream.load(None)


def test_a_position_in_another_data_set_is_refused(tmp_path: Path) -> None:
    saved_by(1, tmp_path)
    path = tmp_path / "train-00000.json"
    path.write_text(path.read_text().replace('"records"', '"lines"'))
    stream = stream_of()
    stream.load(tmp_path)
    with pytest.raises(ValueError, match="not one of this data set, but of one with other stages"):
        next(stream.follow(stream))


def test_a_smaller_world_saves_over_a_larger_one(tmp_path: Path) -> None:
    saved_by(3, tmp_path, 4)
    saved_by(2, tmp_path, 5)
    stream_of().load(tmp_path)
    saved_by(1, tmp_path, 5)
    stream_of().load(tmp_path)


class Shuffled(Streamed):
    """As a stage of ``datasets`` that keeps samples in a buffer."""


def of_datasets(stage: Any, **given: Any) -> Any:
    dataset: Any = Streamed(LENGTHS)
    dataset._ex_iterable = stage
    for name, value in given.items():
        setattr(dataset, name, value)
    return dataset


class Keyless(Streamed):
    def shard(self, num_shards: int, index: int) -> Streamed:
        return self

    def state_dict(self) -> Any:
        return {1: (2, 3)}


@pytest.mark.parametrize(
    ("dataset", "given", "error", "said"),
    [
        (list(range(10)), {}, TypeError, "has no shards .* use ElasticSampler"),
        (iter([1]), {}, TypeError, "has no shards"),
        (Streamed([]), {}, TypeError, r"has no shards \(num_shards=0\)"),
        (
            SimpleNamespace(num_shards=1, shard=lambda many, at: [1, 2]),
            {},
            TypeError,
            "its shards keep no place .* streaming=True",
        ),
        (Keyless([1]), {}, TypeError, "the state of a shard is another one as JSON"),
        (of_datasets(Shuffled([1])), {}, ValueError, r"shuffle\(\) reads samples into a buffer"),
        (
            of_datasets(SimpleNamespace(ex_iterables=[SimpleNamespace(ex_iterable=Shuffled([]))])),
            {},
            ValueError,
            "mix by seed= and lanes=",
        ),
        (of_datasets(None, _distributed=1), {}, ValueError, "leave out split_dataset_by_node"),
        (Streamed([1, 2]), {"rank": 2, "world_size": 3}, ValueError, "2 shards are too few for 3"),
        (Streamed([1, 2]), {"rank": 2, "world_size": 2}, ValueError, "no rank 2 in a world of 2"),
        (Streamed([1]), {"batch_size": 0}, ValueError, "are from 1 on"),
        (Streamed([1]), {"lanes": 0}, ValueError, "are from 1 on"),
        (Streamed([1]), {"batch_size": 2.0}, TypeError, "integer"),
    ],
)
def test_what_cannot_be_exact_is_refused(
    dataset: Any, given: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        elastic_stream(dataset, **{"batch_size": 4, "rank": 0, "world_size": 1, **given})
