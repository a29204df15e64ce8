# SPDX-License-Identifier: Apache-2.0
"""The data order of the transformers ``Trainer`` with an ``ElasticSampler``."""

from __future__ import annotations

from itertools import islice
from math import ceil
from typing import Any, Iterator, List, Mapping, Tuple

from torch import full_like
from torch.utils.data import DataLoader

from muster.checks import refuse
from muster.data import ElasticSampler, seed_step

STATE = "muster.data"
"""Key of the place in the data in the trainer's state, which each checkpoint contains."""

LABELS = ("labels", "shift_labels")
IGNORED = -100
"""The label of a token that transformers and torch leave out of the loss."""


class TrainerData:
    """A replacement for the trainer's own sampler, and for accelerate's sharding and skipping.

    ``trainer`` is a ``transformers.Trainer``.
    """

    def __init__(self, trainer: Any, global_batch: int, last: str) -> None:
        args, dataset = trainer.args, trainer.train_dataset
        if dataset is None or not hasattr(dataset, "__len__"):
            raise ValueError(
                "MusterCallback(trainer, ...): its train_dataset has no length; stream it with"
                " muster.data.shard_stream in a loop of your own"
            )
        wrong = _fault(trainer)
        if wrong:
            refuse(ValueError("MusterCallback(trainer, ...): " + wrong))
        self._trainer = trainer
        self.seed = args.seed if args.data_seed is None else args.data_seed
        self.sampler = ElasticSampler(
            len(dataset),
            self.seed,
            global_batch=global_batch,
            micro_batch=args.per_device_train_batch_size,
            last=last,
            rank=args.process_index,
            world_size=args.world_size,
        )
        args.gradient_accumulation_steps = self.sampler.plan.accumulation
        args.ignore_data_skip = True  # the sampler begins where training goes on
        self._compute_loss = trainer.compute_loss
        self._init_training_state = trainer._init_training_state
        self._create_scheduler = trainer.create_scheduler
        self._last_step = 0
        self._at = 0
        trainer.get_train_dataloader = self.loader
        trainer.compute_loss = self.compute_loss
        trainer.get_batch_samples = self.get_batch_samples
        trainer._init_training_state = self.init_training_state
        trainer.create_scheduler = self.create_scheduler

    def loader(self) -> "DataLoader[Any]":
        """Build the loader of the epoch's rest, without accelerate, as long as a whole epoch."""
        trainer, args = self._trainer, self._trainer.args
        dataset, collate = trainer.train_dataset, trainer.data_collator
        if type(dataset).__module__.startswith("datasets."):
            dataset = trainer._remove_unused_columns(dataset, description="training")
        else:
            collate = trainer._get_collator_with_removed_columns(collate, description="training")
        return DataLoader(
            dataset,
            batch_sampler=self.sampler,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def init_training_state(
        self, max_steps: int, per_epoch: int, epochs: int, *rest: Any
    ) -> Tuple[int, int]:
        """Go on at the checkpoint's place in the data; return the epochs to skip, and the steps.

        ``max_steps`` and ``per_epoch`` are of this global batch. If the steps of the checkpoint
        were of another one, and the trainer has no ``max_steps``, as many more are made as the
        samples that are left need.
        """
        found: Tuple[int, int] = self._init_training_state(max_steps, per_epoch, epochs, *rest)
        state, sampler = self._trainer.state, self.sampler
        recorded = state.stateful_callbacks.get(STATE)
        if not recorded:
            sampler.go_to_step(state.global_step)
            return found
        sampler.go_to(recorded["cursor"])
        if recorded["global_batch"] == sampler.global_batch:
            return found
        if self._trainer.args.max_steps <= 0:
            total = ceil(self._trainer.args.num_train_epochs * per_epoch)
            more = sampler.steps_left + total - (sampler.epoch + 1) * per_epoch
            max_steps = state.global_step + max(0, more)
        state.max_steps = self._last_step = max_steps
        after = max(0, max_steps - state.global_step - sampler.steps_left)
        return epochs - 1 - -(-after // per_epoch), 0

    def create_scheduler(self, num_training_steps: int, *rest: Any, **named: Any) -> Any:
        """Create the trainer's own schedule, to end with the last step."""
        return self._create_scheduler(self._last_step or num_training_steps, *rest, **named)

    def note(self, state: Any) -> None:
        """Count a step, and record the place in the data for the next checkpoint."""
        sampler = self.sampler
        sampler.advance()
        state.epoch = sampler.epoch + sampler.samples / sampler.size
        batch = {"cursor": sampler.cursor, "global_batch": sampler.global_batch}
        state.stateful_callbacks[STATE] = batch

    def get_batch_samples(
        self, batches: Iterator[Any], many: int, device: Any
    ) -> Tuple[List[Any], Any]:
        """Take the micro batches of a step; return them and the number of their tokens.

        A sample that only fills an empty share has none of them.
        """
        taken = list(islice(batches, many))
        parts = self.sampler.parts
        counted = [
            batch if parts[at].samples else _without_labels(batch) for at, batch in enumerate(taken)
        ]
        found = self._trainer._get_num_items_in_batch(counted, device)
        # A rank that counts alone may have nothing but the filler: its loss is then 0 of 1.
        return taken, found.clamp(min=1) if hasattr(found, "clamp") else found

    def begin_step(self, step: int) -> None:
        """Begin the optimizer step after ``step``."""
        self._at = 0
        seed_step(self.seed, step, self.sampler.rank)

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        """Compute the trainer's own loss, weighed by the micro batch's number of samples."""
        counted = named.get("num_items_in_batch") is not None and (
            self._trainer.model_accepts_loss_kwargs
        )
        found = self._compute_loss(model, inputs, *rest, **named)
        if not model.training:
            return found
        part = self.sampler.parts[self._at]
        self._at += 1
        if counted or self._trainer.compute_loss_func is not None:
            return found if part.samples else found * 0.0  # summed, and divided by all there are
        # The trainer divides by the micro batches, and the ranks' gradients are averaged.
        return found * (part.weight * self.sampler.plan.accumulation)


def _fault(trainer: Any) -> str:
    """Return what of the trainer the callback would pass over, and what to write; or ""."""
    if isinstance(getattr(trainer.get_train_dataloader, "__self__", None), TrainerData):
        return "this trainer has such a callback already: make one"
    for name in ("tp", "cp", "sp"):
        many = getattr(trainer, "get_%s_size" % name, lambda: 1)()
        if many > 1:
            return (
                "ranks of a model-parallel group (%s of %d) train the same samples, and it would"
                " give each rank others: use MusterCallback() alone" % (name, many)
            )
    return ""


def _without_labels(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    labels = {name: full_like(batch[name], IGNORED) for name in LABELS if name in batch}
    return {**batch, **labels} if labels else batch
