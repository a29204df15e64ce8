# SPDX-License-Identifier: Apache-2.0
"""The shuffled order: a bijection for any size, the same with numpy and without, well mixed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import orders
from muster.orders import BITS_MAX, Bijection, places

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
