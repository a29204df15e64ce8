# SPDX-License-Identifier: Apache-2.0
"""A shuffled order of any number of samples that is computed, not stored: a keyed bijection.

A Feistel network permutes the numbers of a fixed width in bits; a result outside of the data is
permuted again until it is inside, twice on average at most. So the sample at any place of the order
is known at once, and no place has to be stored. With numpy whole arrays are computed at once,
without it one number after the other: the order is the same.
"""

from __future__ import annotations

import hashlib
from typing import Any, List, Sequence

try:
    import numpy
except ImportError:
    numpy = None  # type: ignore[assignment]

ROUNDS = 6
"""Rounds of the network. More are slower; with four, the samples of neighbouring places can still
be told from random ones."""

BITS_MIN = 10
"""Minimum width: with fewer bits there are too few permutations."""

BITS_MAX = 62

_MULTIPLIERS = {32: (0x9E3779B1, 0x85EBCA77), 64: (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)}
"""Multipliers by word width in bits: odd, with bits in no regular pattern."""


class Bijection:
    """The numbers below ``size`` in an order that ``key`` determines."""

    def __init__(self, size: int, key: str) -> None:
        bits = max(BITS_MIN, (size - 1).bit_length())
        if bits > BITS_MAX:
            raise ValueError("%d samples are too many: there may be 2**%d" % (size, BITS_MAX))
        self.size = size
        self._word = 32 if bits <= 32 else 64
        self._halves = bits // 2, bits - bits // 2
        digest = hashlib.blake2b(("%d:%s" % (size, key)).encode()).digest()
        wide = self._word // 8
        self._keys = [
            int.from_bytes(digest[at * wide : (at + 1) * wide], "little") for at in range(ROUNDS)
        ]

    def __getitem__(self, place: int) -> int:
        found = self._once(place)
        while found >= self.size:
            found = self._once(found)
        return found

    def at(self, places: Sequence[int]) -> List[int]:
        """Return the numbers at these places, which are below ``size``; fast for a numpy array."""
        if numpy is None or len(places) < 8:
            return [self[int(place)] for place in places]
        kind = numpy.uint32 if self._word == 32 else numpy.uint64
        found = numpy.asarray(places).astype(kind)
        self._all_once(found)
        outside = numpy.flatnonzero(found >= self.size)
        while len(outside):
            again = found[outside]
            self._all_once(again)
            found[outside] = again
            outside = outside[again >= self.size]
        listed: List[int] = found.tolist()
        return listed

    def _once(self, number: int) -> int:
        few, many = self._halves
        first, second = _MULTIPLIERS[self._word]
        mask, word = (1 << self._word) - 1, self._word
        left, right = number >> many, number & ((1 << many) - 1)
        for turn, key in enumerate(self._keys):
            mixed = ((left if turn % 2 else right) * first + key) & mask
            mixed = ((mixed ^ (mixed >> (word // 2 - 1))) * second) & mask
            if turn % 2:
                right ^= mixed >> (word - many)
            else:
                left ^= mixed >> (word - few)
        return left << many | right

    def _all_once(self, numbers: Any) -> None:
        """Put each number of an array through the network, in place."""
        kind = numbers.dtype.type
        few, many = (kind(half) for half in self._halves)
        first, second = (kind(one) for one in _MULTIPLIERS[self._word])
        word, fold = kind(self._word), kind(self._word // 2 - 1)
        left = numbers >> many
        right = numbers & kind((1 << int(many)) - 1)
        mixed, folded = numpy.empty_like(numbers), numpy.empty_like(numbers)
        for turn, key in enumerate(self._keys):
            numpy.multiply(left if turn % 2 else right, first, out=mixed)
            mixed += kind(key)
            numpy.right_shift(mixed, fold, out=folded)
            mixed ^= folded
            mixed *= second
            mixed >>= word - (many if turn % 2 else few)
            if turn % 2:
                right ^= mixed
            else:
                left ^= mixed
        left <<= many
        numpy.bitwise_or(left, right, out=numbers)


def places(start: int, step: int, many: int, first: int, last: int) -> Sequence[int]:
    """Return the places ``first`` to ``last``, exclusive, of ``many`` batches, ``step`` apart."""
    if numpy is None:
        return [start + at * step + place for at in range(many) for place in range(first, last)]
    begins: Any = numpy.arange(start, start + many * step, step, dtype=numpy.uint64)
    inside: Any = numpy.arange(first, last, dtype=numpy.uint64)
    found: Sequence[int] = (begins[:, None] + inside).ravel()
    return found
