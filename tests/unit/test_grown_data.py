# SPDX-License-Identifier: Apache-2.0
"""Data that grows between two worlds, and steps that a script counts itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain, islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import muster
from muster.data import ElasticSampler, shard_stream
from muster.saved_steps import UNKEPT

LIVES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 4), st.integers(0, 12), st.booleans()),
    min_size=1, max_size=6,
)  # fmt: skip
"""For each life: by how much the data has grown, ranks, steps, whether it is killed: the cursor is
then the one of two steps before."""


def sampler_of(size: int = 120, **options: Any) -> ElasticSampler:
    return ElasticSampler(size, 3, **{"global_batch": 12, "rank": 0, "world_size": 1, **options})


@given(st.integers(1, 60), st.integers(1, 20), st.sampled_from(["short", "drop"]), LIVES,
       st.booleans())  # fmt: skip
def test_i12_each_sample_once_an_epoch_while_the_data_grows(
    size: int, batch: int, last: str, lives: list[tuple[int, int, int, bool]], shuffle: bool
) -> None:
    """Through drains, joins and kills; what has been added stands behind what was there."""
    size += batch
    saves: list[tuple[Any, list[tuple[int, int, list[int]]]]] = [(None, [])]
    for added, world, steps, killed in [*lives, (0, 1, 10**6, False)]:
        size += added
        cursor, trained = saves[-1]
        ranks = [
            ElasticSampler(size, 3, global_batch=batch, micro_batch=7, rank=rank, world_size=world,
                           last=last, shuffle=shuffle, grows=True)
            for rank in range(world)
        ]  # fmt: skip
        for rank in ranks:
            rank.go_to(cursor)
        lead, saves = ranks[0], [(cursor, trained)]
        for _ in range(steps):
            if lead.epoch == 3:
                break
            epoch = lead.epoch
            if lead.samples == 0 or len(saves) == 1:
                follows = [rank.follow(rank) for rank in ranks]
            step: list[int] = []
            for follow in follows:
                for found, part in follow:
                    step += found if part.samples else []
                    if part.ends_step:
                        break
            saves.append((lead.cursor, [*saves[-1][1], (epoch, size, step)]))
            assert [rank.cursor for rank in ranks] == [lead.cursor] * world
        if killed:
            saves = saves[:-2] or saves
    for epoch in range(3):
        own = [(whole, step) for of, whole, step in saves[-1][1] if of == epoch]
        seen = [one for _, step in own for one in step]
        begun, ended = own[0][0], own[-1][0]
        assert set(Counter(seen).values()) == {1}
        assert len(seen) == (ended if last == "short" else ended // batch * batch)
        assert set(seen[:begun]) <= set(range(begun)), "the order of the beginning comes first"
        alone = sampler_of(begun, global_batch=begun, shuffle=shuffle)
        alone.go_to({"epoch": epoch, "samples": 0, "of": begun, "seed": 3})
        assert next(iter(alone))[: len(seen)] == seen[:begun]


def test_a_cursor_of_fewer_samples_needs_a_word() -> None:
    small = sampler_of()
    list(islice(small.follow(small), 3))
    with pytest.raises(ValueError, match=r"grows=True goes on if samples were added") as e:
        sampler_of(180).go_to(small.cursor)
    assert "behind the 120 that are unchanged" in str(e.value)
    smaller = sampler_of(100, grows=True)
    of_another_seed = ElasticSampler(180, 4, global_batch=12, rank=0, world_size=1, grows=True)
    for wrong in (smaller, of_another_seed):
        with pytest.raises(ValueError, match=r"data and the seed that training has begun with$"):
            wrong.go_to(small.cursor)
    grown = sampler_of(180, grows=True)
    grown.go_to(small.cursor)
    assert grown.cursor == {**small.cursor, "grown": [180]}
    sampler_of(180).go_to(grown.cursor)
    with pytest.raises(ValueError, match="has become smaller"):
        grown.go_to({**grown.cursor, "grown": [180, 150]})
    with pytest.raises(ValueError, match="grows=True is for rows"):
        shard_stream([3, 4], lambda *_: [], global_batch=2, rank=0, world_size=1, grows=True)


@pytest.mark.parametrize("steps", [0, 3, 10])
def test_i12_data_grows_in_the_same_process(steps: int) -> None:
    sampler = sampler_of()
    seen = Counter(one for found, _ in islice(sampler.follow(sampler), steps) for one in found)
    sampler.extend(150)
    sampler.extend(150)
    sampler.extend(170)
    while sampler.epoch < 2:
        for found, _ in sampler.follow(sampler):
            seen.update(found)
    first = range(120 if steps == 10 else 170)
    assert seen == Counter(first) + Counter(range(170))
    with pytest.raises(ValueError, match=r"extend\(160\): these are 170 samples of rows"):
        sampler.extend(160)
    stream = shard_stream([3, 4], lambda *_: [], global_batch=2, rank=0, world_size=1)
    with pytest.raises(ValueError, match=r"extend\(9\): these are 7 samples of a stream of shards"):
        stream.sampler.extend(9)


def move_by_extending(sampler: ElasticSampler) -> None:
    sampler.extend(150)


def move_by_going(sampler: ElasticSampler) -> None:
    sampler.go_to(sampler.cursor)


@pytest.mark.parametrize(
    "move",
    [move_by_extending, move_by_going, ElasticSampler.advance],
    ids=lambda move: move.__name__,
)
def test_a_sampler_that_is_moved_in_a_loop_ends_the_loop(
    move: Callable[[ElasticSampler], None],
) -> None:
    sampler = sampler_of()
    ahead = iter(sampler)  # as a loader's, which has read everything
    batches = [*ahead]
    follow = sampler.follow(batches)
    next(follow)
    move(sampler)
    with pytest.raises(RuntimeError, match="the sampler was moved, by advance, go_to or extend"):
        next(follow)


def count_each_batch(sampler: ElasticSampler, ahead: int) -> None:
    """Train as a loader gives the batches that has read ``ahead`` of them, and go on after it."""
    batches = iter(sampler)
    for _ in chain([*islice(batches, ahead)], batches, range(9)):
        sampler.advance()


@pytest.mark.parametrize("ahead", [0, 8, 10**6])
def test_a_step_that_is_counted_for_each_batch_is_refused(ahead: int) -> None:
    """It ran through four epochs in one, without a word."""
    sampler = sampler_of(micro_batch=3)
    with pytest.raises(RuntimeError, match="once after each optimizer step, here of 4 batches"):
        count_each_batch(sampler, ahead)
    counted = sampler.samples + sampler.epoch * 120
    assert counted <= min(120, 12 * (1 + ahead // 3))


def advanced(before: bool, after: bool, left_out: int) -> ElasticSampler:
    """Train six steps, each of which comes to a boundary."""
    sampler = sampler_of()
    with muster.drain() as drain:
        for step, _ in enumerate(islice(sampler, 6), 1):
            if before and step != left_out:
                sampler.advance()
            drain.commit_due(step)
            if after and step < 6:
                sampler.advance()
    return sampler


@pytest.mark.parametrize(
    ("before", "after", "left_out", "kept"),
    [(True, False, 0, True), (True, False, 3, False), (False, True, 0, False)],
    ids=["each step", "one left out", "after the save"],
)
def test_i12_a_step_that_is_not_counted_is_in_the_cursor(
    caplog: pytest.LogCaptureFixture, before: bool, after: bool, left_out: int, kept: bool
) -> None:
    sampler = advanced(before, after, left_out)
    assert sampler.cursor.get(UNKEPT) == (
        None if kept else "sampler.advance() was not called after each step"
    )
    assert bool(caplog.records) is not kept
    sampler.go_to(sampler.cursor)
    assert bool(sampler.cursor.get(UNKEPT)) is not kept, "to the end of the epoch"
