# SPDX-License-Identifier: Apache-2.0
"""The data order of Lightning's ``Trainer`` with an ``ElasticSampler``."""

from __future__ import annotations

import warnings
from typing import Any, Dict

from muster.checks import refuse
from muster.data import ElasticSampler
from muster.data.wiring import fault

SHORT = (
    "MusterCallback(directory) without a sampler keeps steps, and not samples: in each world the"
    " loader begins with its first rows again. Give the loader"
    " batch_sampler=muster.data.ElasticSampler(len(data), global_batch=...) and write"
    " MusterCallback(directory, sampler), or MusterCallback(directory, steps_only=True)"
)


def take_over(trainer: Any, sampler: ElasticSampler) -> None:
    """Accumulate as many micro batches per step as the sampler yields.

    Raises ``ValueError`` if Lightning would replace the sampler by one of its own.
    """
    if trainer._accelerator_connector.use_distributed_sampler:
        raise ValueError(
            "Lightning would divide the batches once more: give its Trainer"
            " use_distributed_sampler=False"
        )
    trainer.accumulate_grad_batches = sampler.plan.accumulation
    # Lightning warns if the loader has no state; this one begins at the sampler's cursor.
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")


def check_loaders(trainer: Any, module: Any, sampler: ElasticSampler) -> None:
    """Raise ``ValueError`` if the batches that the trainer gets are not those of ``sampler``."""
    if not module.automatic_optimization:
        refuse(
            ValueError(
                "MusterCallback(directory, sampler): with manual optimization it cannot know which"
                " batches a step takes: write MusterCallback(directory, steps_only=True), and call"
                " sampler.advance() yourself"
            )
        )
    loaders = trainer.fit_loop._combined_loader.flattened
    faults = [fault(loader, sampler) for loader in loaders]
    if all(faults):
        refuse(ValueError("MusterCallback(directory, sampler): " + faults[0]))
    for at, loader in enumerate(loaders):
        if faults[at] and not hasattr(loader, "state_dict"):
            refuse(
                ValueError(
                    "MusterCallback(directory, sampler): training loader %d of %d begins with its"
                    " first rows again in each world: give it a state_dict(), or an ElasticSampler"
                    " that is kept with the checkpoint" % (at + 1, len(loaders))
                )
            )


def weigh(trainer: Any, sampler: ElasticSampler, loss: Any) -> None:
    """Scale the loss of a micro batch in place; Lightning has divided it by their number."""
    plan = sampler.plan
    part = sampler.parts[trainer.fit_loop.epoch_loop.batch_idx % plan.accumulation]
    weight = part.weight * plan.accumulation
    if weight != 1.0:
        loss.mul_(weight)


def recount(checkpoint: Dict[str, Any], former: int, present: int) -> None:
    """Convert a checkpoint's counts of batches to those of this world, with ``present`` to a step.

    All batches of a step that was not complete are trained again, as no checkpoint has its
    gradients.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["current"], progress["total"]):
        more = counts["ready"] // former * present - counts["ready"]
        for name in ("ready", "started", "processed", "completed"):
            counts[name] += more
