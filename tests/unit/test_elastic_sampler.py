# SPDX-License-Identifier: Apache-2.0
"""The sampler in worlds that change: each sample once an epoch, whatever is read ahead."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.data import ElasticSampler, sample_seed, shard_stream
from muster.data.stream import ShardStream

WORLDS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 25)), min_size=1, max_size=8)
"""Sizes of worlds, and how many steps each of them makes."""
LAST = st.sampled_from(["short", "drop", "pad"])


class ReadAhead:
    """A loader that has read ``depth`` batches ahead of what it has given out."""

    def __init__(self, sampler: Any, depth: int) -> None:
        self.sampler, self.depth = sampler, depth

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.sampler)
        ahead = list(islice(batches, self.depth))
        for batch in batches:
            ahead.append(batch)
            yield ahead.pop(0)
        yield from ahead


def step_of(sampler: Any, loaders: list[Iterator[Any]]) -> list[Any]:
    """What all ranks train in one step, in the order of the global batch."""
    trained: list[Any] = []
    for loader in loaders:
        for batch, part in loader:
            assert bool(part.samples) == (part.weight > 0)
            assert len(batch) == max(part.samples, 1)
            trained += batch if part.samples else []
            if part.ends_step:
                break
    return trained


def history(make: Any, worlds: list[tuple[int, int]], depth: int, epochs: int) -> list[list[Any]]:
    """Train in one world after the other, each from the cursor of the one before."""
    cursor, steps = None, []
    for world, count in [*worlds, (1, 10**9)]:
        ranks = [make(rank, world) for rank in range(world)]
        for rank in ranks:
            (rank.sampler if isinstance(rank, ShardStream) else rank).go_to(cursor)
        samplers = [rank.sampler if isinstance(rank, ShardStream) else rank for rank in ranks]
        while count and samplers[0].epoch < epochs:
            epoch = samplers[0].epoch
            loaders = [rank.follow(ReadAhead(rank, depth)) for rank in ranks]
            while count and samplers[0].epoch == epoch:
                steps.append(step_of(ranks[0], loaders))
                cursors = [sampler.cursor for sampler in samplers]
                assert all(one == cursors[0] for one in cursors)
                cursor = cursors[0]
                count -= 1
        assert cursor is None or samplers[0].cursor == cursor
    return steps


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 40), st.none() | st.integers(1, 7), WORLDS,
       st.integers(0, 5), st.integers(0, 9), LAST)  # fmt: skip
def test_i12_each_sample_once_an_epoch_in_any_history_of_worlds(
    size: int, batch: int, micro: int | None, worlds: list[tuple[int, int]],
    depth: int, seed: int, last: str,
) -> None:  # fmt: skip
    if last == "drop" and size < batch:
        return

    def make(rank: int, world: int) -> ElasticSampler:
        return ElasticSampler(
            size, seed, global_batch=batch, micro_batch=micro, rank=rank, world_size=world,
            last=last,
        )  # fmt: skip

    steps = history(make, worlds, depth, epochs=2)
    assert steps == history(make, [], 0, epochs=2), "the batches, and their order, are the same"
    each = make(0, 1).steps_per_epoch
    assert len(steps) == 2 * each
    for epoch in range(2):
        seen = Counter(one for step in steps[epoch * each : (epoch + 1) * each] for one in step)
        if last == "short":
            assert seen == Counter(range(size))
        elif last == "drop":
            assert set(seen.values()) == {1}
            assert len(seen) == size // batch * batch
        else:
            assert set(seen) == set(range(size))
            assert seen.total() == each * batch


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(sum), st.integers(1, 6),
       st.integers(1, 6), WORLDS, st.integers(0, 3))  # fmt: skip
def test_i12_each_record_of_a_stream_once_an_epoch_in_any_history_of_worlds(
    records: list[int], lanes: int, each: int, worlds: list[tuple[int, int]], depth: int
) -> None:
    def read(shard: int, start: int, stop: int) -> list[tuple[int, int]]:
        assert 0 <= start < stop <= records[shard]
        return [(shard, record) for record in range(start, stop)]

    def make(rank: int, world: int) -> ShardStream:
        return shard_stream(
            records, read, 3, global_batch=lanes * each, lanes=lanes, rank=rank, world_size=world
        )

    steps = history(make, worlds, depth, epochs=2)
    whole = Counter((shard, one) for shard, many in enumerate(records) for one in range(many))
    epoch = len(steps) // 2
    assert Counter(one for step in steps[:epoch] for one in step) == whole
    assert Counter(one for step in steps[epoch:] for one in step) == whole


@given(st.integers(1, 60), st.integers(1, 20), st.lists(st.tuples(st.integers(1, 3),
       st.integers(1, 9)), max_size=6), st.integers(0, 3))  # fmt: skip
def test_i12_epochs_go_on_in_the_middle_of_one_in_any_history_of_worlds(
    size: int, batch: int, worlds: list[tuple[int, int]], count: int
) -> None:
    """``for epoch in range(count)`` trained whole epochs again after each change of the world."""
    cursor, seen, begun = None, Counter[int](), []
    for world, steps in [*worlds, (1, 10**9)]:
        ranks = [ElasticSampler(size, 3, global_batch=batch, rank=rank, world_size=world)
                 for rank in range(world)]  # fmt: skip
        for rank in ranks:
            rank.go_to(cursor)
        made = 0
        for epoch in ranks[0].epochs(count):
            begun.append(epoch)
            loaders = [rank.follow(rank) for rank in ranks]
            while made < steps and ranks[0].epoch == epoch:
                seen.update(step_of(ranks[0], loaders))
                made += 1
            if made == steps:
                break
        cursor = ranks[0].cursor
    assert seen == Counter(dict.fromkeys(range(size), count) if count else {})
    assert begun == sorted(begun)
    assert set(begun) == set(range(count))


def test_an_epoch_in_which_no_step_is_counted_is_refused() -> None:
    sampler = ElasticSampler(10, global_batch=4, rank=0, world_size=1)
    epochs = sampler.epochs(2)
    assert next(epochs) == 0
    list(sampler)  # as a loop without follow does
    with pytest.raises(RuntimeError, match=r"no step was counted in epoch 0: iterate over sampler"):
        next(epochs)


def test_an_epoch_that_is_left_early_goes_on() -> None:
    sampler = ElasticSampler(10, global_batch=4, rank=0, world_size=1)
    seen, begun = [], []
    for epoch in sampler.epochs(2):
        begun.append(epoch)
        for batch, _ in islice(sampler.follow(sampler), 2):
            seen += batch
    assert begun == [0, 0, 1, 1]
    assert Counter(seen) == Counter(dict.fromkeys(range(10), 2))


@given(st.integers(1, 300), st.integers(1, 50), st.lists(st.integers(1, 50)), st.data())
def test_a_cursor_counts_samples_so_that_the_batch_may_change(
    size: int, batch: int, others: list[int], data: st.DataObject
) -> None:
    cursor, seen = None, Counter[int]()
    for many in [batch, *others, 10**9]:
        sampler = ElasticSampler(size, global_batch=min(many, size), rank=0, world_size=1)
        sampler.go_to(cursor)
        if sampler.epoch:
            break
        for ids, _ in islice(sampler.follow(sampler), data.draw(st.integers(0, 5)) or None):
            seen.update(ids)
        cursor = sampler.cursor
    assert set(seen.values()) <= {1}
    assert cursor is None or cursor["epoch"] or seen.total() == cursor["samples"]


def test_the_cursor_moves_with_the_steps_and_past_the_end_of_an_epoch() -> None:
    sampler = ElasticSampler(10, 7, global_batch=4, micro_batch=1, rank=1, world_size=2)
    assert (sampler.steps_per_epoch, len(sampler)) == (3, 6)
    told = [(part.ends_step, sampler.cursor["samples"]) for _, part in sampler.follow(sampler)]
    assert told == [(False, 0), (True, 4), (False, 4), (True, 8), (False, 8), (True, 0)]
    data = {"of": 10, "seed": 7, "shuffle": True}
    assert sampler.cursor == {"epoch": 1, "samples": 0, **data}
    sampler.go_to_step(4)
    unkept = {"unkept": "the place follows from the number of steps"}
    assert sampler.cursor == {"epoch": 1, "samples": 4, **data, **unkept}
    sampler.go_to({"epoch": 1, "samples": 10, "of": 10, "seed": 7})
    assert (sampler.epoch, sampler.samples) == (2, 0)
    sampler.go_to({**sampler.cursor, "epoch": 5})
    assert sampler.epoch == 5


@pytest.mark.parametrize(
    ("cursor", "words"),
    [
        ({"epoch": 0, "samples": 4, "of": 11, "seed": 7}, "give the data and the seed"),
        ({"epoch": 0, "samples": 4, "of": 10, "seed": 8}, "give the data and the seed"),
        ({"epoch": 0, "samples": 11, "of": 10, "seed": 7}, "no place in the data"),
        ({"epoch": 0}, "is no cursor of an ElasticSampler"),
        ({"epoch": "x", "samples": 1, "of": 1, "seed": 1}, "is no cursor of an ElasticSampler"),
    ],
)
def test_a_cursor_of_other_data_is_refused(cursor: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ElasticSampler(10, 7, global_batch=4, rank=0, world_size=1).go_to(cursor)


def test_what_cannot_be_sampled_is_refused() -> None:
    for wrong in ({"last": "some"}, {"last": "drop", "global_batch": 11}, {"rank": 2}):
        options: dict[str, Any] = {"global_batch": 4, "rank": 0, "world_size": 2, **wrong}
        with pytest.raises(ValueError, match=r"^ElasticSampler: "):
            ElasticSampler(10, **options)
    with pytest.raises(ValueError, match=r"^shard_stream: "):
        shard_stream([3], lambda shard, start, stop: [], global_batch=4, lanes=3)


def records_of(shard: int, start: int, stop: int) -> list[tuple[int, int]]:
    return [(shard, record) for record in range(start, stop)]


def test_a_stream_goes_to_workers_that_are_not_forked() -> None:
    stream = shard_stream([9, 8], records_of, 7, global_batch=4, rank=0, world_size=1)
    stream.sampler.go_to({"epoch": 0, "samples": 4, "of": 17, "seed": 7})
    there = pickle.loads(pickle.dumps(stream))
    assert list(there) == list(stream)
    assert there.sampler.cursor == stream.sampler.cursor


def test_a_loader_that_ends_too_early_is_told_of() -> None:
    sampler = ElasticSampler(10, global_batch=4, rank=0, world_size=1)
    with pytest.raises(RuntimeError, match="the loader has ended before the epoch"):
        list(sampler.follow([[1, 2]]))


def test_without_a_shuffle_the_samples_come_as_they_lie() -> None:
    sampler = ElasticSampler(5, global_batch=2, rank=0, world_size=1, shuffle=False)
    assert list(sampler) == [[0, 1], [2, 3], [4]]
    assert list(sampler.ids()) == [0, 1, 2, 3, 4]


def test_a_sample_has_a_seed_of_its_own_in_each_epoch() -> None:
    seeds = {sample_seed(seed, epoch, one) for seed in range(3) for epoch in range(3) for one in range(99)}  # fmt: skip  # noqa: E501
    assert len(seeds) == 3 * 3 * 99
    assert all(0 <= seed < 2**63 for seed in seeds)
