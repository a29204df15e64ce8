# SPDX-License-Identifier: Apache-2.0
"""How much is asked for at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.mirror import LEAST_KEYS, LONGEST_S, MOST_KEYS, QUICK, Paging
from rdzv.store import DEFAULT_TIMEOUT_S


def test_a_page_that_does_not_come_is_made_smaller_and_then_waited_for_longer() -> None:
    tried = [Paging()]
    for _ in range(7):
        tried.append(tried[-1].after_timeout())
    assert [one.keys for one in tried] == [500, 125, 31, 16, 16, 16, 16, 16]
    assert [one.timeout_s for one in tried] == [2, 2, 2, 2, 4, 8, 8, 8]


def test_pages_that_come_quickly_grow_again() -> None:
    paging = Paging(LEAST_KEYS, LONGEST_S)
    for _ in range(6):
        paging = paging.after_answer(0.01)
    assert paging == Paging()


def test_a_page_that_just_came_is_asked_for_like_that_again() -> None:
    paging = Paging(125, LONGEST_S)
    assert paging.after_answer(0.9 * LONGEST_S / 2) == paging


@given(
    st.lists(st.none() | st.floats(0, LONGEST_S), max_size=40),
)
def test_a_page_stays_within_its_bounds(answers: list[float | None]) -> None:
    paging = Paging()
    for took_s in answers:
        paging = paging.after_timeout() if took_s is None else paging.after_answer(took_s)
        assert LEAST_KEYS <= paging.keys <= MOST_KEYS
        assert DEFAULT_TIMEOUT_S <= paging.timeout_s <= LONGEST_S


@pytest.mark.parametrize("bytes_per_s", [2e3, 2e4, 2e5, 2e6])
def test_a_page_comes_to_fit_a_line_of_any_speed(bytes_per_s: float) -> None:
    key_bytes, read, paging, calls = 500, 0, Paging(), 0
    while read < 3000:
        calls += 1
        took_s = paging.keys * key_bytes / bytes_per_s
        if took_s > paging.timeout_s / 2:
            paging = paging.after_timeout()
        else:
            read += paging.keys
            paging = paging.after_answer(took_s)
    # Not many in vain: one in a few, of those that the line can carry at all.
    carried = 3000 / min(MOST_KEYS, max(LEAST_KEYS, QUICK * LONGEST_S * bytes_per_s / key_bytes))
    assert calls < 10 + 3 * carried
