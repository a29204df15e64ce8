# SPDX-License-Identifier: Apache-2.0
"""The data order of Lightning's ``Trainer`` with an ``ElasticSampler``."""

from __future__ import annotations

import logging
import warnings
from typing import Any, Dict

from muster.checks import refuse
from muster.data import ElasticSampler
from muster.data.wiring import fault

log = logging.getLogger(__name__)

COUNTED = ("limit_train_batches", "val_check_interval")
"""Arguments of the trainer that count the loader's batches, which are micro batches."""

MID_EVALUATION = "restarted_mid_evaluation"
"""The name that Lightning has for a restart that begins with a validation."""

SHORT = (
    "MusterCallback(directory) without a sampler keeps steps, and not samples: in each world the"
    " loader begins with its first rows again. Give the loader"
    " batch_sampler=muster.data.ElasticSampler(len(data), global_batch=...) and write"
    " MusterCallback(directory, sampler), or MusterCallback(directory, steps_only=True)"
)

BEGUN = (
    "MusterCallback(directory, sampler): the checkpoint of step %d was saved without the sampler,"
    " in mid-epoch: its samples were in another order, so some would be trained twice and others"
    " never. Train that epoch to its end without the sampler, or choose a place by"
    " sampler.go_to(sampler.place_of(epoch, samples)) before fit()"
)


def take_over(trainer: Any, sampler: ElasticSampler) -> None:
    """Accumulate as many micro batches per step as the sampler yields.

    What the trainer's arguments count in batches is global batches: so it is the same in every
    world. Raises ``ValueError`` if Lightning would replace the sampler by one of its own.
    """
    if sampler.grows:
        raise ValueError(
            "MusterCallback(directory, sampler): Lightning counts the batches of data of one size:"
            " leave out grows=True"
        )
    if trainer._accelerator_connector.use_distributed_sampler:
        raise ValueError(
            "Lightning would divide the batches once more: give its Trainer"
            " use_distributed_sampler=False"
        )
    many = sampler.plan.accumulation
    if trainer.accumulate_grad_batches not in (1, many):
        log.info(
            "accumulate_grad_batches is %d and not %d: the sampler's global_batch says which batch"
            " the ranks of a world make together",
            many,
            trainer.accumulate_grad_batches,
        )
    trainer.accumulate_grad_batches = many
    steps = sampler.steps_per_epoch
    for name in COUNTED:  # the limit first: a part is one of what it leaves
        asked = getattr(trainer, name)
        if isinstance(asked, float) and 0.0 < asked < 1.0:
            asked = max(1, int(asked * steps))
        if not isinstance(asked, int):
            continue
        setattr(trainer, name, asked * many)
        if name == "limit_train_batches":
            steps = min(steps, asked)
        if many > 1:
            log.info("%s: %d global batches, of %d micro batches here", name, asked, many)
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
    progress = _progress(checkpoint)
    for counts in (progress["current"], progress["total"]):
        more = counts["ready"] // former * present - counts["ready"]
        for name in ("ready", "started", "processed", "completed"):
            counts[name] += more


def adopt(checkpoint: Dict[str, Any], sampler: ElasticSampler) -> None:
    """Go on from a checkpoint that has no place in the data: at the end of its epoch.

    Raises ``ValueError`` if it is in the middle of one, unless the sampler has a place already.
    """
    if sampler.placed:
        return
    begun = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
    if begun["processed"] != begun["ready"] and not _progress(checkpoint)["is_last_batch"]:
        refuse(ValueError(BEGUN % checkpoint["global_step"]))
    sampler.go_to(sampler.place_of(begun["ready"], 0))


def ended_a_step(trainer: Any, checkpoint: Dict[str, Any], accumulation: int) -> bool:
    """Return whether a checkpoint was saved between a step and what the trainer does after it.

    That is validation, and the end of the epoch. The batch then counts as completed: Lightning goes
    on after it, and ``finish`` sees to the rest. False with a Lightning that knows no such restart.
    """
    if not hasattr(trainer.fit_loop.epoch_loop.val_loop, MID_EVALUATION):
        return False
    progress = _progress(checkpoint)
    found = progress["current"]
    ended = bool(
        found["ready"] == found["processed"] == found["completed"] + 1
        and found["ready"] % accumulation == 0
    )
    if ended:
        progress["current"]["completed"] += 1
        progress["total"]["completed"] += 1
    return ended


def _progress(checkpoint: Dict[str, Any]) -> Any:
    return checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]


def finish(trainer: Any) -> None:
    """Have the trainer do first what was left after the step of the checkpoint."""
    fit_loop = trainer.fit_loop
    loop = fit_loop.epoch_loop
    evaluation = loop.val_loop
    if loop._should_check_val_fx(fit_loop._data_fetcher):
        evaluation.batch_progress.reset_on_run()
        evaluation._restart_stage = MID_EVALUATION
        return
    loop._batches_that_stepped += 1
    evaluation._has_run = loop.batch_progress.is_last_batch  # then nothing is left of the epoch


def end_epoch(trainer: Any, sampler: Any) -> None:
    """End the restart with the epoch, and leave out what ``limit_train_batches`` leaves of it."""
    fit_loop = trainer.fit_loop
    loop = fit_loop.epoch_loop
    plateaus = [one for one in trainer.lr_scheduler_configs if one.reduce_on_plateau]
    if all(one.monitor in trainer.callback_metrics for one in plateaus):
        fit_loop._restarting = False  # with True, no plateau is looked for
    loop.on_iteration_done()
    whole = loop.batch_progress.current.ready >= trainer.num_training_batches
    if sampler is not None and sampler.samples and whole:
        sampler.go_to(sampler.place_of(sampler.epoch + 1, 0))
