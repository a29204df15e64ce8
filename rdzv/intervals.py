# SPDX-License-Identifier: Apache-2.0
"""Sets of whole numbers as sorted, disjoint, half-open intervals that do not touch: pure.

A set of 10⁶ consecutive numbers is one pair, so that the trained part of a data set is a few pairs.
"""

from __future__ import annotations

from collections.abc import Iterable

Intervals = tuple[tuple[int, int], ...]


def normal(pieces: Iterable[tuple[int, int]]) -> Intervals:
    """Merge ``pieces``, in any order and overlapping or not, into one set."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pieces):
        if low >= high:
            continue
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def union(*sets: Intervals) -> Intervals:
    """Return the numbers that are in at least one of ``sets``."""
    return normal(piece for one in sets for piece in one)


def without(one: Intervals, other: Intervals) -> Intervals:
    """Return the numbers that are in ``one`` and not in ``other``."""
    left: list[tuple[int, int]] = []
    at = 0
    for low, high in one:
        while at < len(other) and other[at][1] <= low:
            at += 1
        here = at
        while here < len(other) and other[here][0] < high:
            if other[here][0] > low:
                left.append((low, other[here][0]))
            low = other[here][1]
            here += 1
        if low < high:
            left.append((low, high))
    return tuple(left)


def common(one: Intervals, other: Intervals) -> Intervals:
    """Return the numbers that are in both."""
    return without(one, without(one, other))


def covers(one: Intervals, other: Intervals) -> bool:
    """Return whether all of ``other`` is in ``one``."""
    return not without(other, one)


def length(one: Intervals) -> int:
    """Return how many numbers are in the set."""
    return sum(high - low for low, high in one)


def lowest(one: Intervals, count: int) -> Intervals:
    """Return the ``count`` lowest numbers of the set, or all if it has fewer."""
    taken: list[tuple[int, int]] = []
    for low, high in one:
        if count <= 0:
            break
        taken.append((low, min(high, low + count)))
        count -= high - low
    return tuple(taken)
