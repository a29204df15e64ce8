# SPDX-License-Identifier: Apache-2.0
"""Which shard of a data set comes when: an order that a seed and an epoch give, in no memory.

The order is that of a keyed bijection on the numbers of the shards, so that any place of it is
found without the places before. Equal on all machines and all versions of Python.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple, Optional, Tuple

ROUNDS = 6
"""Of the Feistel network. Four make a permutation that looks random; some to spare."""


class ShardOrder(NamedTuple):
    """How a data set of ``size`` records is cut and ordered; ``seed`` None: in its own order."""

    size: int
    shard_size: int
    seed: Optional[int]

    @property
    def shard_count(self) -> int:
        """How many shards there are."""
        return -(-self.size // self.shard_size)

    @property
    def epoch_length(self) -> int:
        """The places of one epoch: as many for each shard, also for the last, which is shorter."""
        return self.shard_count * self.shard_size

    def records(self, place: int, end: int) -> Tuple[int, int, int]:
        """Return the records at the places from ``place`` on, and the place after them.

        They are those from the first number to before the second. They end with the shard, and
        before ``end``. There may be none: the last shard of a data set has places without.
        """
        epoch, at = divmod(place, self.epoch_length)
        position, offset = divmod(at, self.shard_size)
        until = min(end, place - offset + self.shard_size)
        first = self._shard(epoch, position) * self.shard_size + offset
        return min(first, self.size), min(first + until - place, self.size), until

    def _shard(self, epoch: int, position: int) -> int:
        """The shard at ``position`` of an epoch."""
        if self.seed is None:
            return position
        half = max(1, ((self.shard_count - 1).bit_length() + 1) // 2)
        key = blake2b(b"%d %d" % (self.seed, epoch), digest_size=16).digest()
        shard = position
        while True:  # at most a few times: a fourth of the network's numbers at least are shards
            shard = _feistel(shard, half, key)
            if shard < self.shard_count:
                return shard


def _feistel(number: int, half: int, key: bytes) -> int:
    mask = (1 << half) - 1
    left, right = number >> half, number & mask
    for turn in range(ROUNDS):
        mixed = blake2b(b"%d %d" % (turn, right), digest_size=8, key=key).digest()
        left, right = right, left ^ (int.from_bytes(mixed, "big") & mask)
    return left << half | right
