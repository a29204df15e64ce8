# SPDX-License-Identifier: Apache-2.0
"""The loops of Lightning's ``Trainer``: their data order, and a world that changes around them.

In place, ``fit()`` is left at a boundary, or by a collective that a lost rank broke, and begins
again in the next world with the same model. All but the model's tensors goes by way of a checkpoint
of Lightning's own, which stays in memory.
"""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any, Callable, Dict, Mapping, Optional

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import _TunerExitException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.parallel import DistributedDataParallel

from muster.data import ElasticSampler
from muster.data.loader import fault_of_loader
from muster.process import refuse
from muster.world.reentry import PART, Reentry, WorldChanges

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

IN_MEMORY = "the memory of this world"
"""Given to Lightning as the path of a checkpoint that is no file."""

UNTRIED = (
    *("WeightAveraging", "StochasticWeightAveraging", "BatchSizeFinder", "LearningRateFinder"),
    *("GradientAccumulationScheduler", "OnExceptionCheckpoint"),
)
"""Callbacks that act on the whole of ``fit()``, or on its end by an exception."""


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
    faults = [fault_of_loader(loader, sampler) for loader in loaders]
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


class InPlaceFit:
    """One trainer, from its first world to its last; it is the part besides the model's tensors.

    ``callback``: the trainer's ``MusterCallback``. ``resume``: the checkpoint to begin with, whose
    step is ``step``.
    """

    def __init__(
        self,
        callback: Any,
        trainer: Trainer,
        model: LightningModule,
        resume: Optional[str],
        step: int,
    ) -> None:
        self._callback = callback
        self._trainer: Any = trainer
        self._model = model
        self._given: Dict[str, Any] = {"resume": resume}
        """The state with which ``fit()`` begins."""
        self._loops: Optional[Dict[str, Any]] = None
        """Lightning's counts after the last whole step; None before the first boundary."""
        self._counted = -1
        """The last step that is counted."""
        self._left = False
        self.leaving = False
        """Whether the checkpoint that is made is one of memory."""
        self._wrapped: Any = None
        self._asked = {name: getattr(trainer, name) for name in COUNTED}
        strategy: Any = trainer.strategy
        self._load = strategy.load_checkpoint
        strategy.load_checkpoint = self.load_checkpoint
        if strategy.root_device.type == "cuda":
            torch.cuda.set_device(strategy.root_device)
        parts = {"model": model, "sampler": callback.sampler, PART: self}
        backend, timeout = strategy._get_process_group_backend(), strategy._timeout
        self.world = Reentry(backend, parts, self, step=step, timeout=timeout)

    def fit(self, fit: Callable[[Optional[str]], None]) -> None:
        """Fit in one world after the other; raises ``FallsBack`` as ``Reentry.run`` does."""

        def enter() -> None:
            self._left = False
            fit(self._given["resume"] if "checkpoint" not in self._given else IN_MEMORY)
            if self._left:
                raise WorldChanges

        counts = FitCounter(self)
        self._trainer.callbacks.insert(0, counts)
        try:
            with self.world:
                self.world.run(enter)
        finally:
            self._trainer.callbacks.remove(counts)
            self._trainer.strategy.load_checkpoint = self._load

    def begin(self) -> Any:
        """Note what ``fit()`` has wrapped, as it begins to train; return the part in drains."""
        self._wrapped = self._trainer.strategy.model
        self._counted = self._trainer.global_step
        if self._given.get("stops"):
            self._trainer.should_stop = True
        return self.world.drain

    def boundary(self) -> None:
        """Come to the boundary before a step; leave ``fit()`` if the world has to change.

        The batch that is there already is read again in the next world.
        """
        self._loops = loops = self._counts()
        progress = loops["fit_loop"]["epoch_loop.batch_progress"]
        progress["is_last_batch"] = False
        for counts in (progress["current"], progress["total"]):
            counts.update(dict.fromkeys(("ready", "started", "processed"), counts["completed"]))
        try:
            self.world.boundary()
        except WorldChanges:
            self._left = True
            raise _TunerExitException from None  # the one end of fit() that is no failure

    def count_step(self) -> None:
        """Count a step that is made, if this batch has ended one, and its samples.

        What Lightning does after it is still to come.
        """
        step = self._trainer.global_step
        if step == self._counted:
            return
        self._counted = step
        self._callback.sampler.advance()
        self.world.count_step()
        self._loops = self._counts()

    def _counts(self) -> Dict[str, Any]:
        found: Dict[str, Any] = self._trainer._checkpoint_connector._get_loops_state_dict()
        return copy.deepcopy(found)

    def load_checkpoint(self, path: Any, *rest: Any, **named: Any) -> Any:
        """Return the checkpoint in memory, or load that of a file."""
        if path != IN_MEMORY:
            return self._load(path, *rest, **named)
        given = self._given["checkpoint"]
        loops = copy.deepcopy(given["loops"])  # the callback counts its batches anew
        return {**given, "loops": loops, "state_dict": self._model.state_dict()}

    # -- what a world is made of

    def release(self) -> None:
        """Take the hooks of a world that is over off the model."""
        strategy = self._trainer.strategy
        for one in (self._wrapped, strategy.model):
            if isinstance(one, DistributedDataParallel):
                one._remove_autograd_hooks()
        self._wrapped = None
        if isinstance(strategy.model, DistributedDataParallel):
            strategy.model = strategy.lightning_module

    def wrap(self) -> None:
        """Have Lightning see this world; ``fit()`` wraps the model."""
        trainer, strategy = self._trainer, self._trainer.strategy
        nodes = self.world.group_size // strategy.num_processes
        strategy.num_nodes = nodes
        strategy.launcher.num_nodes = nodes
        strategy.set_world_ranks()
        for name, asked in self._asked.items():
            setattr(trainer, name, asked)
        self._callback.count_again()

    def leave(self) -> None:
        """Keep the state with which ``fit()`` begins again."""
        if self._loops is None:
            return  # nothing was trained: it begins as before
        trainer = self._trainer
        self.leaving = True
        try:
            made = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        finally:
            self.leaving = False
        made.pop("state_dict")
        made["loops"], self._loops = self._loops, None
        self._given = {"resume": None, "checkpoint": made, "stops": trainer.should_stop}

    def state_dict(self) -> Dict[str, Any]:
        """Return the state with which ``fit()`` begins."""
        return self._given

    def load_state_dict(self, given: Dict[str, Any]) -> None:
        """Begin with the state of another rank."""
        self._given, self._loops = given, None


class FitCounter(Callback):
    """Counts each step before the other callbacks are called: a loss that breaks one costs none."""

    def __init__(self, fit: InPlaceFit) -> None:
        self._fit = fit

    def on_train_batch_end(self, *_: Any) -> None:
        """Count the step: the optimizer and the schedules of its kind have made it."""
        self._fit.count_step()


def fault_in_place(trainer: Any, model: LightningModule) -> str:
    """Return why a trainer cannot train on in another world of the same process; or ""."""
    strategy = trainer.strategy
    if type(strategy) is not DDPStrategy:
        return "it needs strategy='ddp', and not %s" % type(strategy).__name__
    untried = [type(one).__name__ for one in trainer.callbacks if _is_untried(one)]
    refused: Mapping[str, bool] = {
        "precision %r" % trainer.precision: getattr(trainer.precision_plugin, "scaler", None)
        is not None,
        "model averaging": strategy._model_averaging_period is not None,
        "configure_model(), which makes layers late": is_overridden("configure_model", model),
        "manual optimization": not model.automatic_optimization,
        ", ".join(untried): bool(untried),
    }
    found = [name for name, given in refused.items() if given]
    return "it was not tried with %s: leave one of the two out" % ", ".join(found) if found else ""


def _is_untried(callback: Any) -> bool:
    kinds = {kind.__name__ for kind in type(callback).__mro__}
    return bool(kinds.intersection(UNTRIED)) or getattr(callback, "save_on_exception", False)
