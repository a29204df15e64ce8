# SPDX-License-Identifier: Apache-2.0
"""The division of a global batch among the ranks of a world of any size, and the learning rate.

The optimizer sees the same batches in the same order in every world, so the learning rate stays the
same; where the batch grows with the world, it follows the number of ranks.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional, Sequence, Tuple

from muster.process import own_world


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
    torch's process group or the launcher unless given. ``weights``: relative sizes of the
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


def scale_lr(
    base_lr: float,
    base_world_size: int,
    *,
    rule: str = "linear",
    world_size: Optional[int] = None,
    step: int = 0,
    warmup_steps: int = 0,
    former_world_size: Optional[int] = None,
) -> float:
    """Return the learning rate for a world of another size than the one of ``base_lr``.

    ``base_lr`` was tuned on a world of ``base_world_size`` ranks. ``rule`` is ``"linear"`` (lr
    grows as the global batch does; for SGD) or ``"sqrt"`` (its square root; for Adam and its kin).
    ``world_size`` is that of this process's world unless given. Over the first
    ``warmup_steps`` steps of this world the rate goes in equal parts from that of a world of
    ``former_world_size`` ranks (``base_world_size`` unless given) to the new one; ``step`` counts
    the steps made in this world, from 0.

    Raises ``ValueError`` for a size below 1, a negative count or an unknown rule. If each rank's
    batch shrinks as the world grows, so that the global batch stays, there is nothing to scale.
    """
    if world_size is None:
        _, world_size = own_world("scale_lr")
    if former_world_size is None:
        former_world_size = base_world_size
    if min(base_world_size, world_size, former_world_size) < 1:
        raise ValueError(
            "scale_lr: world sizes are at least 1, not base_world_size=%d, world_size=%d,"
            " former_world_size=%d" % (base_world_size, world_size, former_world_size)
        )
    if step < 0 or warmup_steps < 0:
        raise ValueError(
            "scale_lr: step=%d and warmup_steps=%d may not be negative" % (step, warmup_steps)
        )
    goal = base_lr * _factor(rule, world_size / base_world_size)
    if step >= warmup_steps:
        return goal
    start = base_lr * _factor(rule, former_world_size / base_world_size)
    return start + (goal - start) * step / warmup_steps


def _factor(rule: str, ratio: float) -> float:
    if rule == "linear":
        return ratio
    if rule == "sqrt":
        return math.sqrt(ratio)
    raise ValueError('scale_lr: rule is "linear" or "sqrt", not %r' % (rule,))
