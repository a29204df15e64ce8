# SPDX-License-Identifier: Apache-2.0
"""The learning rate of an elastic world: it follows the number of ranks."""

from __future__ import annotations

import math
from typing import Optional

from muster.own_world import own_world


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
