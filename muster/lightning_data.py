# SPDX-License-Identifier: Apache-2.0
"""Which samples a ``Trainer`` of Lightning trains next: those of an ``ElasticSampler``."""

from __future__ import annotations

import warnings
from typing import Any, Dict

from muster.data import ElasticSampler


def take_over(trainer: Any, sampler: ElasticSampler) -> None:
    """Accumulate as many micro batches as the sampler gives for a step.

    Raises ``ValueError`` where Lightning would put a sampler of its own in the place of this one.
    """
    if trainer._accelerator_connector.use_distributed_sampler:
        raise ValueError(
            "Lightning would divide the batches once more: give its Trainer"
            " use_distributed_sampler=False"
        )
    trainer.accumulate_grad_batches = sampler.plan.accumulation
    # It looks for a loader with a state; this one begins where the sampler is.
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")


def weigh(trainer: Any, sampler: ElasticSampler, loss: Any) -> None:
    """Weigh the loss of a micro batch, which Lightning has divided by their number already."""
    plan = sampler.plan
    part = sampler.parts[trainer.fit_loop.epoch_loop.batch_idx % plan.accumulation]
    weight = part.weight * plan.accumulation
    if weight != 1.0:
        loss.mul_(weight)


def recount(checkpoint: Dict[str, Any], former: int, present: int) -> None:
    """Count the batches of a checkpoint in those of this world: ``present`` to a step.

    Of a step that was not complete then, whose gradients no checkpoint has, all are trained again.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["current"], progress["total"]):
        more = counts["ready"] // former * present - counts["ready"]
        for name in ("ready", "started", "processed", "completed"):
            counts[name] += more
