# SPDX-License-Identifier: Apache-2.0
"""The orders of samples and shards of an epoch, and seeds: the same in every world, and computed.

A Feistel network permutes the numbers of a fixed width in bits; a result outside of the data is
permuted again until it is inside. So the sample at any place of the order is known at once. With
numpy whole arrays are computed at once, without it one number after the other: the order is the
same, on all machines and all versions of Python.
"""

from __future__ import annotations

import hashlib
import random
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

if TYPE_CHECKING:
    pass

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

KINDS = {"shuffle": "rows (ElasticSampler)", "stream": "a stream of shards (shard_stream)"}
"""The kinds of order, by the name under which a cursor has the facts of one."""


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


class RowOrder:
    """The rows of a data set, shuffled by seed and epoch, or as they lie.

    ``sizes``: the number of rows with which the epoch has begun, and those that it has grown to
    since. ``facts``: what the order follows from, besides these and the seed; part of each cursor.
    """

    def __init__(self, sizes: Sequence[int], seed: int, shuffle: bool) -> None:
        self.facts: Dict[str, Any] = {"shuffle": shuffle}
        self.sizes, self._seed = tuple(sizes), seed

    def of_sizes(self, sizes: Sequence[int]) -> RowOrder:
        """Return the order of other sizes."""
        return RowOrder(sizes, self._seed, self.facts["shuffle"])

    def of_epoch(self, epoch: int) -> Any:
        """Return the order of the samples of an epoch: those it has grown by come last."""
        if not self.facts["shuffle"]:
            return PlainOrder()
        key = "%d:%d" % (self._seed, epoch)
        first, low = Bijection(self.sizes[0], key), self.sizes[0]
        pieces = [(0, low, first)]
        for high in self.sizes[1:]:
            pieces.append((low, high, Bijection(high - low, "%s:%d" % (key, low))))
            low = high
        return first if len(pieces) == 1 else GrownOrder(pieces)


class GrownOrder:
    """Several orders one behind the other, each of the samples from ``low`` to ``high``."""

    def __init__(self, pieces: Sequence[Tuple[int, int, Bijection]]) -> None:
        self._pieces = pieces

    def at(self, places: Sequence[int]) -> List[int]:
        """Return the samples at these places."""
        wanted, found = [int(place) for place in places], [0] * len(places)
        for low, high, order in self._pieces:
            inside = [at for at, place in enumerate(wanted) if low <= place < high]
            for number, sample in enumerate(order.at([wanted[at] - low for at in inside])):
                found[inside[number]] = low + sample
        return found


class PlainOrder:
    """All samples in their own order."""

    def at(self, places: Sequence[int]) -> List[int]:
        """Return the samples at these places."""
        return [int(place) for place in places]


def difference(cursor: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return how the order that a cursor is of differs from the one of the ``own`` facts; or "".

    Nothing is known of a cursor without such facts, as an older one.
    """
    then = {kind: cursor[kind] for kind in KINDS if kind in cursor}
    if not then or then == own:
        return ""
    (kind,) = own
    if kind not in then:
        was = next(KINDS[other] for other in then)
        return "the cursor is of %s, and this is %s" % (was, KINDS[kind])
    pairs = [(facts[kind] if kind == "stream" else facts) for facts in (then, own)]
    names = [name for name in {**pairs[0], **pairs[1]} if pairs[0].get(name) != pairs[1].get(name)]
    named = [name for name in names if name != "records"]
    if not named:
        return "the cursor is of shards with other numbers of records"
    listed = [", ".join("%s=%s" % (name, one.get(name)) for name in named) for one in pairs]
    return "the cursor is of an order with %s, and this one has %s" % (listed[0], listed[1])


def other_data(then: Sequence[int], seed: int, size: int, own_seed: int, grows: bool) -> str:
    """Return why a cursor is not of these ``size`` rows, and what to write; or "".

    ``then``: the sizes that the cursor names. ``grows``: the rows may have become more since.
    """
    if sorted(set(then)) != list(then):
        return "the cursor is of data that has become smaller: %s" % (list(then),)
    if seed == own_seed and (then[-1] == size or (then[-1] < size and grows)):
        return ""
    said = (
        "the cursor is of %d samples in the order of seed %d, and these are %d of seed %d: give the"
        " data and the seed that training has begun with" % (then[-1], seed, size, own_seed)
    )
    if seed != own_seed or size < then[-1]:
        return said
    return said + (
        "; in a loop of your own and muster.train, grows=True goes on if samples were added behind"
        " the %d that are unchanged" % then[-1]
    )


class ShardOrder(NamedTuple):
    """The cut of a data set of ``size`` records, and its order; ``seed`` None: in its own order.

    The order is that of a keyed bijection on the numbers of the shards, so that any place of it
    is computed without the places before.
    """

    size: int
    shard_size: int
    seed: Optional[int]

    @property
    def shard_count(self) -> int:
        """The number of shards."""
        return -(-self.size // self.shard_size)

    @property
    def epoch_length(self) -> int:
        """The places of one epoch: as many for each shard, also for the last, which is shorter."""
        return self.shard_count * self.shard_size

    def records(self, place: int, end: int) -> Tuple[int, int, int]:
        """Return the records at the places from ``place`` on, and the place after them.

        The records are those from the first number to before the second; the third is the place
        after them. They end with the shard, and before ``end``. There may be none: the last shard
        of a data set has places without records.
        """
        epoch, at = divmod(place, self.epoch_length)
        position, offset = divmod(at, self.shard_size)
        until = min(end, place - offset + self.shard_size)
        first = self._shard(epoch, position) * self.shard_size + offset
        return min(first, self.size), min(first + until - place, self.size), until

    def _shard(self, epoch: int, position: int) -> int:
        """Return the shard at ``position`` of an epoch."""
        if self.seed is None:
            return position
        return _shuffled(self.shard_count, self.seed, epoch)[position]


@lru_cache(maxsize=4)
def _shuffled(count: int, seed: int, epoch: int) -> "Bijection":

    return Bijection(count, "%d:%d" % (seed, epoch))


def sample_seed(seed: int, epoch: int, sample: int) -> int:
    """Return a seed, below 2**63, for the random numbers of one sample in one epoch.

    ``random.Random(sample_seed(...))`` in ``__getitem__`` augments a sample alike in every world,
    whichever rank's loader reads it, in whichever worker.
    """
    return _digest("sample:%d:%d:%d" % (seed, epoch, sample))


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Seed random, numpy and torch (if they are imported) for the optimizer step after ``step``.

    With the same ``rank`` everywhere, numbers drawn once for the whole batch are the same on all
    ranks of any world. With each rank's own, ranks draw different numbers: those of a sample then
    depend on the rank that has it, so dropout masks differ between worlds.
    """
    drawn = _digest("step:%d:%d:%d" % (seed, step, rank))
    random.seed(drawn)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(drawn % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(drawn)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
