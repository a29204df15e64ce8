# SPDX-License-Identifier: Apache-2.0
"""Which samples a ``Trainer`` of transformers trains next: those of an ``ElasticSampler``."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from muster.data import ElasticSampler, seed_step


class TrainerData:
    """Takes the place of the trainer's own sampler, and of accelerate's sharding and skipping.

    ``trainer`` is a ``transformers.Trainer``.
    """

    def __init__(self, trainer: Any, global_batch: int, last: str) -> None:
        args, dataset = trainer.args, trainer.train_dataset
        if dataset is None or not hasattr(dataset, "__len__"):
            raise ValueError(
                "MusterCallback(trainer, ...): its train_dataset has no length; stream it with"
                " muster.data.shard_stream in a loop of your own"
            )
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
        self._at = 0
        trainer.get_train_dataloader = self.loader
        trainer.compute_loss = self.compute_loss

    def loader(self) -> "DataLoader[Any]":
        """The rest of the epoch, as long as a whole one to the trainer; not accelerate's."""
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

    def begin(self, step: int) -> None:
        """Go on after ``step`` optimizer steps."""
        self.sampler.go_to_step(step)

    def begin_step(self, step: int) -> None:
        """Begin the optimizer step after ``step``."""
        self._at = 0
        seed_step(self.seed, step, self.sampler.rank)

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        """The trainer's own loss, weighed by how many samples of the batch it is of."""
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
