# SPDX-License-Identifier: Apache-2.0
"""How many nodes a world may have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.records.template import Sizes

COUNTS = st.integers(1, 12)
SIZES = st.builds(Sizes, COUNTS, COUNTS, st.lists(COUNTS, max_size=4).map(tuple), st.integers(1, 5))


def permitted(sizes: Sizes, nodes: int) -> bool:
    """The definition, size by size."""
    chosen = nodes in sizes.allowed if sizes.allowed else nodes % sizes.unit == 0
    return chosen and sizes.least <= nodes <= sizes.most


@given(SIZES, st.integers(0, 14))
def test_the_largest_size_is_allowed_and_none_between_is(sizes: Sizes, nodes: int) -> None:
    expected = [size for size in range(1, nodes + 1) if permitted(sizes, size)]
    assert sizes.largest(nodes) == max(expected, default=0)


@given(SIZES)
def test_the_smallest_and_the_full_size_are_the_ends_or_a_fault_is_told(sizes: Sizes) -> None:
    every = [size for size in range(1, 13) if permitted(sizes, size)]
    assert bool(sizes.fault) == (not every)
    assert sizes.full == max(every, default=0)
    if every:
        assert sizes.smallest == min(every)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (Sizes(3, 2), "min is 3, more than max, which is 2: raise max or lower min"),
        (Sizes(3, 5, (2, 6)), "none of the sizes 2, 6 lies between min 3 and max 5"),
        (Sizes(5, 7, unit=4), "no multiple of 4 lies between min 5 and max 7"),
    ],
)
def test_sizes_that_no_world_can_have_are_told(sizes: Sizes, said: str) -> None:
    assert sizes.fault.startswith(said)
