# SPDX-License-Identifier: Apache-2.0
"""The shuffled order and places in it; batches and learning rates of worlds of any size."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import orders
from muster.data import ElasticSampler, ShardStream, batch_plan, scale_lr, shard_stream
from muster.orders import BITS_MAX, KINDS, Bijection, places
from muster.transformers_data import ByLength

SIZE = 20_000


@given(st.integers(1, 5000), st.integers())
def test_every_number_comes_once(size: int, seed: int) -> None:
    assert sorted(Bijection(size, str(seed)).at(range(size))) == list(range(size))


@given(st.integers(1, 2**BITS_MAX), st.integers(), st.lists(st.integers(0, 2**BITS_MAX)))
def test_without_numpy_the_order_is_the_same(size: int, seed: int, asked: list[int]) -> None:
    order = Bijection(size, str(seed))
    some = [place % size for place in asked] + [0] * 8
    one_by_one = [order[place] for place in some]
    assert order.at(np.array(some, dtype=np.uint64)) == one_by_one
    assert all(0 <= number < size for number in one_by_one)


@given(st.integers(0, 10**12), st.integers(1, 50), st.integers(1, 9), st.data())
def test_places_without_numpy_are_the_same(
    start: int, step: int, many: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, step - 1))
    last = data.draw(st.integers(first, step))
    listed = [start + at * step + place for at in range(many) for place in range(first, last)]
    assert [int(place) for place in places(start, step, many, first, last)] == listed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orders, "numpy", None)
        assert places(start, step, many, first, last) == listed


def scores(order: np.ndarray) -> dict[str, float]:
    """How far an order is from chance, each in standard deviations of a random one."""
    size = len(order)
    at = np.arange(size)
    neighbours = np.corrcoef(order[:-1], order[1:])[0, 1] * np.sqrt(size)
    drift = np.corrcoef(at, order)[0, 1] * np.sqrt(size)
    rises = (np.count_nonzero(np.diff(order) > 0) - (size - 1) / 2) / np.sqrt((size + 1) / 12)
    stays = np.count_nonzero(order == at) - 1.0
    # Where the numbers of each tenth of the data come to lie, by tenths.
    table = np.histogram2d(at, order, bins=10)[0]
    expected = size / 100
    square = ((table - expected) ** 2 / expected).sum()
    spread = (square - 81) / np.sqrt(2 * 81)
    low = np.corrcoef(at[:-1] % 2, order[1:] % 2)[0, 1] * np.sqrt(size)
    near = np.count_nonzero(np.abs(np.diff(order)) < 10) - 20.0
    return {
        "neighbours": neighbours, "drift": drift, "rises": rises, "stays": stays / 3,
        "spread": spread, "low bits": low, "near": near / np.sqrt(20),
    }  # fmt: skip


@pytest.mark.parametrize("size", [SIZE, 16_384, 65_537])
def test_it_is_as_well_shuffled_as_numpys_permutation(size: int) -> None:
    """Over many seeds no score is further from chance, on average, than numpy's own orders are."""
    seeds = range(40)
    ours = [scores(np.array(Bijection(size, f"{seed}:0").at(np.arange(size)))) for seed in seeds]  # type: ignore[arg-type]
    theirs = [scores(np.random.default_rng(seed).permutation(size)) for seed in seeds]
    for name in ours[0]:
        of_ours = np.array([score[name] for score in ours])
        of_theirs = np.array([score[name] for score in theirs])
        assert abs(of_ours.mean()) < 1.0, (name, of_ours.mean(), of_theirs.mean())
        assert of_ours.std() < 2 * of_theirs.std() + 0.2, (name, of_ours.std(), of_theirs.std())


def test_epochs_and_seeds_have_nothing_in_common() -> None:
    def order(key: str) -> np.ndarray:
        found = Bijection(SIZE, key).at(np.arange(SIZE))  # type: ignore[arg-type]
        shuffled: np.ndarray = np.array(found)
        return shuffled

    keys = [f"{seed}:{epoch}" for seed in range(4) for epoch in range(4)]
    orders = [order(key) for key in keys]
    for at, one in enumerate(orders):
        for other in orders[:at]:
            assert np.count_nonzero(one == other) < 12
            assert abs(np.corrcoef(one, other)[0, 1]) * np.sqrt(SIZE) < 5


def test_more_samples_than_there_may_be_are_refused() -> None:
    with pytest.raises(ValueError, match="too many"):
        Bijection(2**BITS_MAX + 1, "")


WORLDS = st.integers(1, 40)


@given(st.integers(1, 500), st.integers(1, 70), WORLDS, st.data())
def test_the_ranks_parts_are_the_batch_and_weigh_what_they_hold(
    batch: int, micro: int, world: int, data: st.DataObject
) -> None:
    weights = data.draw(st.none() | st.lists(st.integers(1, 9), min_size=world, max_size=world))
    total = data.draw(st.integers(1, batch))
    plan = batch_plan(batch, micro, world_size=world, weights=weights)
    taken: list[int] = []
    for rank in range(world):
        parts = plan.parts(rank, total)
        assert len(parts) == plan.accumulation
        assert [part.ends_step for part in parts] == [False] * (len(parts) - 1) + [True]
        for part in parts:
            assert part.samples <= plan.micro_batch <= micro
            assert part.weight == pytest.approx(part.samples * world / total)
            taken += range(part.start, part.stop)
    assert taken == list(range(total))


@given(st.integers(1, 60), st.integers(1, 9), WORLDS, st.integers(0, 99))
def test_gradients_averaged_over_the_ranks_are_those_of_the_whole_batch(
    batch: int, micro: int, world: int, seed: int
) -> None:
    gradients = [Fraction(random.Random(seed + at).randint(-99, 99)) for at in range(batch)]
    plan = batch_plan(batch, micro, world_size=world)
    ranks = []
    for rank in range(world):
        parts = [part for part in plan.parts(rank) if part.samples]
        means = [sum(gradients[part.start : part.stop]) / part.samples for part in parts]
        weights = [Fraction(part.samples * world, batch) for part in parts]
        ranks.append(sum(mean * weight for mean, weight in zip(means, weights, strict=True)))
    assert sum(ranks) / world == sum(gradients) / batch


def test_a_rank_of_twice_the_weight_takes_twice_as_much() -> None:
    plan = batch_plan(64, 8, world_size=3, weights=(2, 1, 1))
    assert [plan.share(rank) for rank in range(3)] == [(0, 32), (32, 48), (48, 64)]
    assert plan.accumulation == 4
    assert [part.samples for part in plan.parts(1)] == [4, 4, 4, 4]


@pytest.mark.parametrize(
    "wrong",
    [
        {"global_batch": 0},
        {"micro_batch": 0},
        {"world_size": 0},
        {"weights": (1,)},
        {"weights": (1, 0)},
    ],
)
def test_numbers_that_make_no_plan_are_refused(wrong: dict[str, object]) -> None:
    asked: dict[str, object] = {"global_batch": 8, "micro_batch": 2, "world_size": 2, **wrong}
    with pytest.raises(ValueError, match=r"^batch_plan: "):
        batch_plan(**asked)  # type: ignore[arg-type]


def test_the_world_is_torchruns_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert batch_plan(64).share(3) == (48, 64)


SIZES = st.integers(1, 4096)


def test_it_follows_the_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scale_lr(0.1, 8, world_size=16) == pytest.approx(0.2)
    assert scale_lr(0.1, 8, world_size=2) == pytest.approx(0.025)
    assert scale_lr(0.1, 8, world_size=32, rule="sqrt") == pytest.approx(0.2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert scale_lr(0.1, 8) == pytest.approx(0.05)
    monkeypatch.delenv("WORLD_SIZE")
    assert scale_lr(0.1, 1) == 0.1


def test_it_warms_up_from_the_former_world() -> None:
    rates = [
        scale_lr(0.1, 8, world_size=16, former_world_size=4, step=step, warmup_steps=3)
        for step in range(5)
    ]
    assert rates == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.2])
    assert scale_lr(0.1, 8, world_size=16, warmup_steps=3) == pytest.approx(0.1)


@given(
    SIZES, SIZES, SIZES, st.integers(0, 50), st.integers(0, 50), st.sampled_from(["linear", "sqrt"])
)
def test_it_never_leaves_what_lies_between_the_two_worlds(
    base: int, size: int, former: int, step: int, warmup: int, rule: str
) -> None:
    rate = scale_lr(
        1.0,
        base,
        world_size=size,
        former_world_size=former,
        step=step,
        warmup_steps=warmup,
        rule=rule,
    )
    ends = [scale_lr(1.0, base, world_size=end, rule=rule) for end in (former, size)]
    assert min(ends) * (1 - 1e-9) <= rate <= max(ends) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"base_world_size": 0}, "world sizes are at least 1"),
        ({"world_size": 0}, "world_size=0"),
        ({"former_world_size": -1}, "former_world_size=-1"),
        ({"rule": "cubic"}, "'cubic'"),
        ({"step": -1}, "step=-1"),
        ({"warmup_steps": -2}, "warmup_steps=-2"),
    ],
)
def test_mistakes_are_said(arguments: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        scale_lr(**{"base_lr": 0.1, "base_world_size": 8, **arguments})  # type: ignore[arg-type]


ROWS, BATCH, STOP = 120, 12, 5
SHARDS = (40, 40, 40)


def rows(size: int = ROWS, **options: Any) -> ElasticSampler:
    return ElasticSampler(size, 3, rank=0, world_size=1, **{"global_batch": BATCH, **options})


def stream(records: tuple[int, ...] = SHARDS, **options: Any) -> ShardStream:
    def read(shard: int, start: int, stop: int) -> Iterator[int]:
        return iter(range(sum(records[:shard]) + start, sum(records[:shard]) + stop))

    options = {"global_batch": BATCH, "lanes": 4, **options}
    return shard_stream(records, read, 3, rank=0, world_size=1, **options)


def sampler_of(made: Any) -> ElasticSampler:
    return made.sampler if isinstance(made, ShardStream) else made


def lives(then: Any, now: Any, stop: int = STOP, without: tuple[str, ...] = ()) -> Counter[Any]:
    """Train ``stop`` steps of one life, and in another one what is left of the epoch."""
    seen = [one for batch, _ in islice(then.follow(then), stop) for one in batch]
    cursor = {name: value for name, value in sampler_of(then).cursor.items() if name not in without}
    sampler_of(now).go_to(cursor)
    if sampler_of(now).epoch == 0:
        seen += [one for batch, _ in now.follow(now) for one in batch]
    return Counter(seen)


@pytest.mark.parametrize(
    ("make", "again", "said", "before"),
    [
        (rows, lambda: rows(shuffle=False),
         "shuffle=True, and this one has shuffle=False", "27 never, 27 twice"),
        (stream, lambda: stream(lanes=2),
         "lanes=4, and this one has lanes=2", "30 never, 30 twice"),
        (stream, lambda: stream(global_batch=24),
         "global_batch=12, and this one has global_batch=24", "6 never, 6 twice"),
        (stream, lambda: stream(lanes=1),
         "lanes=4, global_batch=12, and this one has lanes=1", "some never, some twice"),
        (stream, lambda: stream((30, 50, 40)),
         "of shards with other numbers of records", "10 never, 10 twice"),
        (stream, lambda: stream((40, 40, 20, 20)),
         "shards=3, and this one has shards=4", "some never, some twice"),
        (rows, stream,
         "of rows (ElasticSampler), and this is a stream of shards", "another order"),
        (stream, rows,
         "of a stream of shards (shard_stream), and this is rows", "another order"),
    ],
)  # fmt: skip
def test_i12_a_cursor_of_another_order_is_refused(
    make: Any, again: Any, said: str, before: str
) -> None:
    with pytest.raises(ValueError, match="give what the epoch has begun with") as caught:
        lives(make(), now := again())
    assert said in str(caught.value), before
    assert sampler_of(now).cursor["samples"] == 0, "a refused cursor changes nothing"


@pytest.mark.parametrize(
    ("make", "then", "now"),
    [
        (rows, {}, {"global_batch": 32}),
        (rows, {"shuffle": False}, {"shuffle": False, "micro_batch": 5}),
        (stream, {"lanes": 1}, {"lanes": 1, "global_batch": 25}),
        (stream, {}, {"micro_batch": 5}),
    ],
    ids=["rows, batch", "rows in order", "one lane, batch", "lanes, micro batch"],
)
@pytest.mark.parametrize("without", [(), tuple(KINDS)], ids=["", "a cursor without its order"])
def test_i12_options_that_leave_the_order_alone_may_change(
    make: Any, then: dict[str, Any], now: dict[str, Any], without: tuple[str, ...]
) -> None:
    assert lives(make(**then), make(**now), stop=2, without=without) == Counter(range(ROWS))


def test_an_epoch_that_has_not_begun_may_have_another_order() -> None:
    assert lives(rows(), rows(shuffle=False), stop=ROWS // BATCH) == Counter(range(ROWS))
    assert lives(stream(), stream(lanes=2), stop=ROWS // BATCH) == Counter(range(ROWS))


LENGTHS_ROWS, LENGTHS_BATCH = 100, 16
LENGTHS = [1 + number * 37 % 61 for number in range(LENGTHS_ROWS)]


def lengths_sampler_of(
    rank: int, world_size: int, micro_batch: int | None, last: str
) -> ElasticSampler:
    given = {"global_batch": LENGTHS_BATCH, "micro_batch": micro_batch, "last": last}
    return ElasticSampler(LENGTHS_ROWS, 5, rank=rank, world_size=world_size, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("last", ["short", "drop", "pad"])
@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 4), (3, 2), (4, None), (7, 2)])
def test_i12_each_global_batch_keeps_its_samples(
    world_size: int, micro_batch: int | None, last: str
) -> None:
    whole = lengths_sampler_of(0, 1, None, last)
    ranks = [lengths_sampler_of(rank, world_size, micro_batch, last) for rank in range(world_size)]
    for each in (whole, *ranks):
        each.go_to_step(2)
    dealt = [iter(ByLength(each, LENGTHS, last)) for each in ranks]
    for batch in whole.batches():
        together, at_once = [], []
        for number in range(ranks[0].plan.accumulation):
            micro = [next(each) for each in dealt]
            counted = [
                (part, len(part)) if each.parts[number].samples else ([], 0)
                for part, each in zip(micro, ranks, strict=True)
            ]
            assert [many for _, many in counted] == [each.parts[number].samples for each in ranks]
            at_once.append([LENGTHS[one] for part, _ in counted for one in part])
            together += [one for part, _ in counted for one in part]
        assert sorted(together) == sorted(batch)
        flat = [length for lengths in at_once for length in lengths]
        assert flat == sorted(flat, reverse=True), "the longest first, on all ranks at once"
        for each in ranks:
            each.advance()
    assert [list(each) for each in dealt] == [[]] * world_size
