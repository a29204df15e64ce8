# SPDX-License-Identifier: Apache-2.0
"""A global batch in worlds of any size: all of it, once, and the same mean gradient."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.data import batch_plan

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
