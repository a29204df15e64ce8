# SPDX-License-Identifier: Apache-2.0
"""The division of a global batch among the ranks of a world of any size: pure.

The optimizer sees the same batches in the same order in every world, so the learning rate stays the
same.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence, Tuple

from muster.own_world import own_world


class MicroBatch(NamedTuple):
    """One micro batch of one rank.

    ``start`` and ``stop`` are places in the global batch. ``weight`` is the factor for the mean
    loss over the micro batch before ``backward()``: summed over the micro batches and averaged over
    the ranks, as DistributedDataParallel does, the weighted losses give the mean over the global
    batch, however uneven the parts are. ``ends_step``: the optimizer step comes after this one.
    """

    start: int
    stop: int
    weight: float
    ends_step: bool

    @property
    def samples(self) -> int:
        """The number of samples that count. A rank with none still gets one sample, of weight 0."""
        return self.stop - self.start


class BatchPlan:
    """The share of each rank in each global batch, as made by ``batch_plan``."""

    def __init__(
        self, global_batch: int, micro_batch: Optional[int], world_size: int, weights: Sequence[int]
    ) -> None:
        self.global_batch = global_batch
        self.world_size = world_size
        self._ends = None if not weights else _running_sums(weights)
        last = world_size if weights else 1  # without weights the last share is one of the largest
        shares = [self.share(world_size - 1 - rank) for rank in range(last)]
        most = max(stop - start for start, stop in shares)
        self.accumulation = 1 if micro_batch is None else max(1, -(-most // micro_batch))
        """Micro batches per optimizer step; the same number on every rank."""
        self.micro_batch = -(-most // self.accumulation)
        """Samples in the largest micro batch."""

    def share(self, rank: int, total: Optional[int] = None) -> Tuple[int, int]:
        """Return the bounds of a rank's share of ``total`` samples (by default, a global batch)."""
        count = self.global_batch if total is None else total
        if self._ends is None:
            return count * rank // self.world_size, count * (rank + 1) // self.world_size
        every = self._ends[-1]
        return count * self._ends[rank] // every, count * self._ends[rank + 1] // every

    def parts(self, rank: int, total: Optional[int] = None) -> Tuple[MicroBatch, ...]:
        """Return a rank's micro batches of ``total`` samples (by default, of a global batch)."""
        of = self.global_batch if total is None else total
        start, stop = self.share(rank, of)
        many, count = self.accumulation, stop - start
        bounds = [start + count * number // many for number in range(many + 1)]
        return tuple(
            MicroBatch(
                bounds[at],
                bounds[at + 1],
                (bounds[at + 1] - bounds[at]) * self.world_size / of,
                at + 1 == many,
            )
            for at in range(many)
        )


def batch_plan(
    global_batch: int,
    micro_batch: Optional[int] = None,
    *,
    world_size: Optional[int] = None,
    weights: Optional[Sequence[int]] = None,
) -> BatchPlan:
    """Divide a batch of ``global_batch`` samples, of all ranks together, in this world.

    ``micro_batch``: the most samples that a rank takes at once; it accumulates gradients if its
    share is larger. None: each rank takes its share at once. ``world_size`` is that of
    torch's process group, Horovod or torchrun unless given. ``weights``: relative sizes of the
    ranks' shares, whole numbers in rank order, for ranks of different speed; every rank must give
    the same.

    Raises ``ValueError`` if a number is below 1, or if there is not one weight for each rank.
    """
    if world_size is None:
        _, world_size = own_world("batch_plan")
    if min(global_batch, world_size, 1 if micro_batch is None else micro_batch) < 1:
        raise ValueError(
            "batch_plan: global_batch=%s, micro_batch=%s and world_size=%s are at least 1"
            % (global_batch, micro_batch, world_size)
        )
    if weights is not None and (len(weights) != world_size or min(weights) < 1):
        raise ValueError(
            "batch_plan: weights=%s: give each of the %d ranks a whole number from 1 on"
            % (list(weights), world_size)
        )
    return BatchPlan(global_batch, micro_batch, world_size, weights or ())


def _running_sums(weights: Sequence[int]) -> Tuple[int, ...]:
    ends = [0]
    for weight in weights:
        ends.append(ends[-1] + weight)
    return tuple(ends)
