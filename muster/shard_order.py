# SPDX-License-Identifier: Apache-2.0
"""The order of the shards of a data set, computed from a seed and an epoch, without a list of them.

The order is that of a keyed bijection on the numbers of the shards, so that any place of it is
computed without the places before. Equal on all machines and all versions of Python.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Optional, Tuple

if TYPE_CHECKING:
    from muster.bijection import Bijection


class ShardOrder(NamedTuple):
    """The cut of a data set of ``size`` records, and its order; ``seed`` None: in its own order."""

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
    from muster.bijection import Bijection  # importing numpy, which that tries, takes a while

    return Bijection(count, "%d:%d" % (seed, epoch))
