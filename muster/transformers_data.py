# SPDX-License-Identifier: Apache-2.0
"""The data order of the transformers ``Trainer`` with an ``ElasticSampler``, and its faults.

The callback takes the place of the trainer's own order of data. What of it the user has chosen is
kept, or refused.
"""

from __future__ import annotations

import logging
from itertools import islice
from math import ceil
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from muster.data import ElasticSampler, seed_step
from muster.process import refuse

log = logging.getLogger(__name__)

ORDERS = ("random", "sequential", "group_by_length")
"""The values of ``train_sampling_strategy`` whose order the callback keeps."""

HOOKS = ("_get_train_sampler", "get_train_dataloader", "get_batch_samples")
"""Methods of a trainer that choose samples, and that the callback replaces."""

SHORT = (
    "MusterCallback() without the trainer keeps steps, and not samples: a world of another size"
    " would train some of them twice and others never. Write MusterCallback(trainer,"
    " global_batch=%d), which is the batch of all ranks here, or MusterCallback(steps_only=True)"
)

MODEL_ALONE = (
    "save_only_model=True saves no optimizer, schedule and random numbers, so training could not go"
    " on from a commit: leave it out"
)

LATER = (
    "this rank was started beside a world that trains and changes in place, and can come into it by"
    " muster.transformers.train(..., in_place=True) alone: give every rank the same call"
)

BEGUN = (
    "the checkpoint of step %d was saved without MusterCallback(trainer, ...), in the middle of an"
    " epoch: its samples were in another order, so some would be trained twice and others never."
    " Train that epoch to its end without the callback, or insist by replace=True"
)

MEAN = (
    "the loss of %s is a mean, and does not use num_items_in_batch: the trainer adds up the means"
    " of all micro batches and ranks, so the optimizer's step differs between worlds. %s"
)

MEAN_OF_MODEL = (
    "Write trainer.model_accepts_loss_kwargs = False before train(): the step is then that of the"
    " mean over the global batch, in every world"
)

MEAN_OF_FUNCTION = "Let compute_loss_func divide a sum by num_items_in_batch"

STATE = "muster.data"
"""Key of the place in the data in the trainer's state, which each checkpoint contains."""

LABELS = ("labels", "shift_labels")
IGNORED = -100
"""The label of a token that transformers and torch leave out of the loss."""


def fault_of_trainer(trainer: Any, *, replace: bool) -> str:
    """Return what of the trainer the callback would pass over, and what to write; or ""."""
    hook = vars(trainer).get("get_train_dataloader")
    if type(getattr(hook, "__self__", None)).__module__.startswith("muster."):
        return "this trainer has such a callback already: make one"
    for name in ("tp", "cp", "sp"):
        many = getattr(trainer, "get_%s_size" % name, lambda: 1)()
        if many > 1:
            return (
                "ranks of a model-parallel group (%s of %d) train the same samples, and it would"
                " give each rank others: use MusterCallback(steps_only=True)" % (name, many)
            )
    if replace:
        return ""
    for name in HOOKS:
        owner = _owner(trainer, name)
        if owner:
            return (
                "%s.%s chooses samples, and the callback would not call it: leave it out, or insist"
                " on the callback's own order by replace=True, or keep steps alone by"
                " MusterCallback(steps_only=True)" % (owner, name)
            )
    wanted = order(trainer.args)
    if wanted not in ORDERS:
        return (
            "it does not know train_sampling_strategy=%r: give one of %s, or insist on a random"
            " order by replace=True" % (wanted, ", ".join(ORDERS))
        )
    return ""


def order(args: Any) -> str:
    """Return the order of data that the arguments ask for."""
    by_length = getattr(args, "group_by_length", False)  # before transformers 5
    return str(
        getattr(args, "train_sampling_strategy", "group_by_length" if by_length else "random")
    )


def total_batch(args: Any) -> int:
    """Return the batch of all ranks that the arguments make in this world."""
    return int(
        args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    )


def _owner(trainer: Any, name: str) -> str:
    """Return the name of what overrides a method of transformers' own trainers; or ""."""
    if name in vars(trainer):
        return "trainer"
    for one in type(trainer).__mro__:
        if name in vars(one):
            return "" if one.__module__.startswith("transformers.") else one.__qualname__
    return ""


class ByLength:
    """The batches of a sampler with the samples of each global batch dealt by their length.

    Which samples a global batch has stays as it is, so the place in the data and the optimizer's
    steps do, too. The ranks have samples of about the same length at the same time, the longest
    first.
    """

    def __init__(self, sampler: ElasticSampler, lengths: Sequence[int], last: str) -> None:
        self._sampler, self._lengths = sampler, lengths
        self._whole = ElasticSampler(
            sampler.size,
            sampler.seed,
            global_batch=sampler.global_batch,
            last=last,
            rank=0,
            world_size=1,
        )
        self._bounds: Dict[int, List[slice]] = {}

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[List[int]]:
        """Yield this rank's micro batches from the sampler's cursor to the end of the epoch."""
        self._whole.go_to(self._sampler.cursor)
        for batch in self._whole.batches():
            ordered = sorted(map(int, batch), key=self._lengths.__getitem__, reverse=True)
            for own in self._bounds_of(len(ordered)):
                yield ordered[own] or ordered[-1:]

    def _bounds_of(self, total: int) -> List[slice]:
        """Return the places of this rank's micro batches in a batch of ``total`` samples."""
        if total not in self._bounds:
            plan, at, found = self._sampler.plan, 0, []
            parts = [plan.parts(rank, total) for rank in range(plan.world_size)]
            for number in range(plan.accumulation):
                for rank in range(plan.world_size):
                    end = at + parts[rank][number].samples
                    if rank == self._sampler.rank:
                        found.append(slice(at, end))
                    at = end
            self._bounds[total] = found
        return self._bounds[total]


class TrainerData:
    """A replacement for the trainer's own sampler, and for accelerate's sharding and skipping.

    ``trainer`` is a ``transformers.Trainer``.
    """

    def __init__(
        self, trainer: Any, global_batch: int, last: Optional[str], *, replace: bool = False
    ) -> None:
        args, dataset = trainer.args, trainer.train_dataset
        if not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset):
            raise ValueError(
                "MusterCallback(trainer, ...): its train_dataset has no length, or no order but its"
                " own; stream it with muster.data.shard_stream in a loop of your own"
            )
        wrong = fault_of_trainer(trainer, replace=replace)
        if wrong:
            refuse(ValueError("MusterCallback(trainer, ...): " + wrong))
        if not global_batch:
            raise ValueError(
                "MusterCallback(trainer, ...): give the batch of all ranks together, here"
                " global_batch=%d" % total_batch(args)
            )
        self._trainer = trainer
        self._batch, self._replace = global_batch, replace
        drops = getattr(args, "dataloader_drop_last", False)
        self._last = last or ("drop" if drops else "short")
        self.seed = args.seed if args.data_seed is None else args.data_seed
        asked = args.gradient_accumulation_steps
        self.sampler = self._cut(args.per_device_train_batch_size)
        if asked not in (1, args.gradient_accumulation_steps):
            log.info(
                "gradient_accumulation_steps is %d and not %d: global_batch=%d says which batch"
                " the ranks of a world make together",
                args.gradient_accumulation_steps,
                asked,
                global_batch,
            )
        args.ignore_data_skip = True  # the sampler begins where training goes on
        self._compute_loss = trainer.compute_loss
        self._init_training_state = trainer._init_training_state
        self._create_scheduler = trainer.create_scheduler
        self._last_step = 0
        self._at = 0
        self.probed = False
        """Whether the kind of loss was looked at: once, on all ranks together."""
        trainer.get_train_dataloader = self.loader
        trainer.compute_loss = self.compute_loss
        trainer.get_batch_samples = self.get_batch_samples
        trainer._init_training_state = self.init_training_state
        trainer.create_scheduler = self.create_scheduler

    def _cut(self, micro_batch: int) -> ElasticSampler:
        """Return a sampler of micro batches of at most so many; the trainer accumulates them."""
        args = self._trainer.args
        sampler = ElasticSampler(
            len(self._trainer.train_dataset),
            self.seed,
            global_batch=self._batch,
            micro_batch=micro_batch,
            last=self._last,
            shuffle=order(args) != "sequential",
            rank=args.process_index,
            world_size=args.world_size,
        )
        args.gradient_accumulation_steps = sampler.plan.accumulation
        self._micro_batch = micro_batch
        return sampler

    def loader(self) -> "DataLoader[Any]":
        """Build the loader of the epoch's rest, without accelerate, as long as a whole epoch."""
        trainer, args = self._trainer, self._trainer.args
        if args.auto_find_batch_size and trainer._train_batch_size != self._micro_batch:
            self.sampler = self._cut(trainer._train_batch_size)
        batches: Any = self.sampler
        lengths = None
        if order(args) == "group_by_length":
            lengths = getattr(trainer._get_train_sampler(), "lengths", None)
        if lengths is not None:
            batches = ByLength(self.sampler, lengths, self._last)
        dataset, collate = trainer.train_dataset, trainer.data_collator
        if type(dataset).__module__.startswith("datasets."):
            dataset = trainer._remove_unused_columns(dataset, description="training")
        else:
            collate = trainer._get_collator_with_removed_columns(collate, description="training")
        return DataLoader(
            dataset,
            batch_sampler=batches,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None),
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
        if recorded:
            sampler.go_to(recorded["cursor"])
            same = recorded["global_batch"] == sampler.global_batch
        else:
            same = self._adopt(state)
        if same:
            return found
        if self._trainer.args.max_steps <= 0:
            total = ceil(self._trainer.args.num_train_epochs * per_epoch)
            more = sampler.steps_left + total - (sampler.epoch + 1) * per_epoch
            max_steps = state.global_step + max(0, more)
        return self.go_on(max_steps, per_epoch, epochs), 0

    def go_on(self, max_steps: int, per_epoch: int, epochs: int) -> int:
        """Go on from the sampler's place to ``max_steps``; return the epochs to skip."""
        state = self._trainer.state
        state.max_steps = self._last_step = max_steps
        after = max(0, max_steps - state.global_step - self.sampler.steps_left)
        return int(epochs - 1 - -(-after // per_epoch))

    def _adopt(self, state: Any) -> bool:
        """Go on from a checkpoint that has no place in the data: at the end of its epoch.

        Returns whether its steps were of this global batch.
        """
        sampler = self.sampler
        epoch, part = divmod(state.epoch or 0.0, 1)
        samples = round(part * sampler.size)
        if samples not in (0, sampler.size) and not self._replace:
            refuse(ValueError("MusterCallback(trainer, ...): " + BEGUN % state.global_step))
        sampler.go_to(sampler.place_of(int(epoch), samples))
        made = sampler.epoch * sampler.steps_per_epoch + sampler.samples // sampler.global_batch
        return bool(made == state.global_step)

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
        items = named.get("num_items_in_batch")
        if model.training and not self.probed:
            self.probed = True
            self._probe(model, inputs, items)
        found = self._compute_loss(model, inputs, *rest, **named)
        if not model.training:
            return found
        part = self.sampler.parts[self._at]
        self._at += 1
        if self._scaled(items):
            return found if part.samples else found * 0.0  # summed, and divided by all there are
        # The trainer divides by the micro batches, and the ranks' gradients are averaged.
        return found * (part.weight * self.sampler.plan.accumulation)

    def _scaled(self, items: Any) -> bool:
        """Return whether the trainer takes a loss as scaled for the accumulation."""
        trainer = self._trainer
        said = getattr(trainer, "loss_is_scaled_for_ga", None)  # since transformers 5.23
        if said is not None:
            return bool(said)
        counted = items is not None and trainer.model_accepts_loss_kwargs
        return bool(counted or trainer.compute_loss_func is not None)

    def _probe(self, model: Any, inputs: Any, items: Any) -> None:
        """Log a warning if the trainer takes a loss for a sum over a number that is a mean."""
        trainer = self._trainer
        if items is None or getattr(trainer, "loss_is_scaled_for_ga", None) is not None:
            return
        if not self._scaled(items) or not hasattr(inputs, "items"):
            return
        losses = []
        model.eval()
        with torch.no_grad():
            for many in (items, 2 * items):
                self.begin_step(trainer.state.global_step)  # with the same random numbers
                once = self._compute_loss(model, dict(inputs), num_items_in_batch=many)
                losses.append(abs(float(once.mean())))
        model.train()
        self.begin_step(trainer.state.global_step)
        if 0.0 < losses[0] < 1.001 * losses[1] and self.sampler.rank == 0:
            cure = MEAN_OF_MODEL if trainer.compute_loss_func is None else MEAN_OF_FUNCTION
            log.warning(MEAN, type(trainer.model).__name__, cure)


def _without_labels(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    labels = {name: torch.full_like(batch[name], IGNORED) for name in LABELS if name in batch}
    return {**batch, **labels} if labels else batch
