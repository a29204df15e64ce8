# SPDX-License-Identifier: Apache-2.0
"""A Trainer of transformers whose world changes around it, in the same process.

``train()`` is left at a boundary, or by a collective that a lost rank broke. accelerate then sees
the next world, ``train()`` begins again with the same model, optimizer and schedule, and the state
of the trainer is put back by hand: no file is read.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Dict, Iterator, List, Optional, Tuple

from accelerate.state import GradientState
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput

from muster.transformers_data import STATE, TrainerData
from muster.world.reentry import PART, Reentry

OWN_OPTION = "num_steps"
"""The option of accelerate that a trainer writes into the user's, and refuses to find there."""


class InPlaceTrain:
    """One trainer, from its first world to its last; it is the part of its state besides tensors.

    ``resume``: the checkpoint to begin with. Raises ``ValueError`` for parts of the trainer that
    cannot be handed over.
    """

    def __init__(self, trainer: Trainer, data: TrainerData, resume: Optional[str]) -> None:
        self._trainer: Any = trainer
        self._data = data
        self._given: Dict[str, Any] = {"resume": resume}
        """The state with which ``train()`` begins."""
        self._entering = True
        """Whether ``train()`` has not come to its first boundary yet."""
        self._tokens: Any = 0
        self._eval_on_start = trainer.args.eval_on_start
        self._own_schedule = trainer.lr_scheduler
        self._init_training_state = data.init_training_state
        self._create_scheduler = data.create_scheduler
        trainer._init_training_state = self.init_training_state
        trainer.create_scheduler = self.create_scheduler
        trainer.get_batch_samples = self.get_batch_samples
        self._counts = TrainCounter(self)
        # Prepared before the state is handed over: accelerate loads an optimizer's state, which may
        # cast it.
        trainer.create_optimizer()
        trainer.optimizer = trainer.accelerator.prepare(trainer.optimizer)
        self.world = self._world(_step_of(resume))

    def _world(self, step: int) -> Reentry:
        trainer = self._trainer
        parts = {
            "model": trainer.model,
            "optimizer": trainer.optimizer,
            "sampler": self._data.sampler,
            PART: self,
        }
        if self._own_schedule is not None:
            parts["schedule"] = self._own_schedule
        state = trainer.args.distributed_state
        timeout = trainer.args.ddp_timeout_delta
        return Reentry(state.backend or "gloo", parts, self, step=step, timeout=timeout)

    def train(self) -> TrainOutput:
        """Train from the checkpoint to the end; raises ``FallsBack`` as ``Reentry.run`` does."""
        callbacks: List[Any] = self._trainer.callback_handler.callbacks
        callbacks.insert(0, self._counts)
        try:
            with self.world:
                return self.world.run(self._train)
        finally:
            callbacks.remove(self._counts)

    def withdraw(self) -> None:
        """Leave the trainer to the callback, as without changes in place."""
        trainer = self._trainer
        trainer._init_training_state = self._init_training_state
        trainer.create_scheduler = self._create_scheduler
        trainer.get_batch_samples = self._data.get_batch_samples
        trainer.args.eval_on_start = self._eval_on_start

    def _train(self) -> TrainOutput:
        self._trainer.args.eval_on_start = self._eval_on_start and "state" not in self._given
        return self._trainer.train(resume_from_checkpoint=self._given["resume"])

    # -- what a world is made of

    def release(self) -> None:
        """Take what accelerate has wrapped around the model off it."""
        trainer = self._trainer
        accelerator = trainer.accelerator
        for one in [*accelerator._models, trainer.model_wrapped]:
            if isinstance(one, DistributedDataParallel):
                one._remove_autograd_hooks()
        accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)
        trainer.model_wrapped = trainer.model
        accelerator.free_memory()

    def wrap(self) -> None:
        """Have accelerate and the trainer's arguments see this world; ``train()`` wraps the model.

        The process group is there already: accelerate takes its rank and size from it.
        """
        trainer, args = self._trainer, self._trainer.args
        options = args.accelerator_config.gradient_accumulation_kwargs
        if options:
            options.pop(OWN_OPTION, None)
        vars(args).pop("_setup_devices", None)
        args._setup_devices  # noqa: B018
        GradientState._reset_state()
        trainer.create_accelerator_and_postprocess()
        vars(trainer).pop("_eval_dataloaders", None)  # they are divided among the former ranks
        args.gradient_accumulation_steps = self._data.sampler.plan.accumulation

    def leave(self) -> None:
        """Keep the state with which ``train()`` begins again."""
        self._given = self.state_dict()
        self._entering = True
        self._trainer._created_lr_scheduler = False  # the schedule goes on

    # -- the state besides tensors and data

    def state_dict(self) -> Dict[str, Any]:
        """Return the state after the last whole step."""
        if self._entering:
            return self._given
        trainer = self._trainer
        state = dataclasses.asdict(trainer.state)
        state["num_input_tokens_seen"] = self._tokens
        schedule = None if self._own_schedule is not None else trainer.lr_scheduler.state_dict()
        return {
            "resume": None,
            "state": state,
            "schedule": schedule,
            "callbacks": [one.state().get("attributes", {}) for one in self._kept_callbacks()],
            "stops": trainer.control.should_training_stop,
        }

    def load_state_dict(self, given: Dict[str, Any]) -> None:
        """Begin with the state of another rank."""
        self._given, self._entering = given, True
        kept = given.get("callbacks", ())
        for at, one in enumerate(self._kept_callbacks()):
            attributes = kept[at] if at < len(kept) else {}
            for name, value in attributes.items():
                setattr(one, name, value)

    def _kept_callbacks(self) -> List[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [one for one in callbacks if isinstance(one, ExportableState)]

    def count_step(self, state: TrainerState) -> None:
        """Count a step that is made, and its samples."""
        self._data.note(state)
        self._tokens = state.num_input_tokens_seen
        self.world.count_step()

    # -- what the trainer calls

    def init_training_state(
        self, max_steps: int, per_epoch: int, epochs: int, *rest: Any
    ) -> Tuple[int, int]:
        """Put the trainer's state back; return the epochs to skip, and the steps."""
        found = self._init_training_state(max_steps, per_epoch, epochs, *rest)
        if "state" not in self._given:
            return found
        trainer, data = self._trainer, self._data
        data.probed = True
        state = trainer.state = TrainerState(**self._given["state"])
        state.is_local_process_zero = trainer.is_local_process_zero()
        state.is_world_process_zero = trainer.is_world_process_zero()
        sampler = data.sampler
        recorded = state.stateful_callbacks.get(STATE)
        sampler.go_to(recorded["cursor"] if recorded else sampler.place_of(0, 0))
        return data.go_on(state.max_steps, per_epoch, epochs), 0

    def create_scheduler(self, num_training_steps: int, *rest: Any, **named: Any) -> Any:
        """Create the trainer's schedule, or go on with it, at its place."""
        groups = self._trainer.optimizer.param_groups
        options = [{key: one for key, one in group.items() if key != "params"} for group in groups]
        made: LRScheduler = self._create_scheduler(num_training_steps, *rest, **named)
        if self._given.get("schedule") is not None:
            made.load_state_dict(self._given["schedule"])
            for at, kept in enumerate(options):
                groups[at].update(kept)  # a schedule that is made sets its first rate
        return made

    def get_batch_samples(
        self, batches: Iterator[Any], many: int, device: Any
    ) -> Tuple[List[Any], Any]:
        """Come to the boundary before a step, and take its micro batches."""
        trainer = self._trainer
        again = self._entering and "state" in self._given
        over = again and trainer.state.global_step >= trainer.state.max_steps
        if over or (again and self._given["stops"]):
            trainer.control.should_training_stop = True
            return [], None
        if self._entering:
            self._tokens = trainer.state.num_input_tokens_seen
            self._entering = False
        self.world.boundary()
        return self._data.get_batch_samples(batches, many, device)


class TrainCounter(TrainerCallback):
    """Counts each step before the other callbacks are called: a loss that breaks one costs none."""

    def __init__(self, train: InPlaceTrain) -> None:
        self._train = train

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Count the step: optimizer, schedule and the trainer's own counts have made it."""
        self._train.count_step(state)


def _step_of(resume: Optional[str]) -> int:
    return int(os.path.basename(resume).rpartition("-")[2]) if resume else 0
