# SPDX-License-Identifier: Apache-2.0
"""Which shard of a data set comes when: an order that a seed and an epoch give, in no memory.

The order is that of a keyed bijection on the numbers of the shards, so that any place of it is
found without the places before. Equal on all machines and all versions of Python.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Optional, Tuple

if TYPE_CHECKING:
    from muster.data.bijection import Bijection


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
        return _shuffled(self.shard_count, self.seed, epoch)[position]


@lru_cache(maxsize=4)
def _shuffled(count: int, seed: int, epoch: int) -> "Bijection":
    from muster.data.bijection import Bijection  # it looks for numpy, which takes a while

    return Bijection(count, "%d:%d" % (seed, epoch))
