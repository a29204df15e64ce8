# SPDX-License-Identifier: Apache-2.0
"""A Trainer of Lightning whose world changes around it, in the same process.

``fit()`` is left at a boundary, or by a collective that a lost rank broke, and begins again in the
next world with the same model. All but the model's tensors goes by way of a checkpoint of
Lightning's own, which stays in memory.
"""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, Mapping, Optional

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import _TunerExitException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.parallel import DistributedDataParallel

from muster.lightning_data import COUNTED
from muster.world.reentry import PART, Reentry, WorldChanges

IN_MEMORY = "the memory of this world"
"""Given to Lightning as the path of a checkpoint that is no file."""

UNTRIED = (
    *("WeightAveraging", "StochasticWeightAveraging", "BatchSizeFinder", "LearningRateFinder"),
    *("GradientAccumulationScheduler", "OnExceptionCheckpoint"),
)
"""Callbacks that act on the whole of ``fit()``, or on its end by an exception."""


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


def fault(trainer: Any, model: LightningModule) -> str:
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
