# SPDX-License-Identifier: Apache-2.0
"""Draining for Hugging Face's ``Trainer``::

    import muster.transformers

    trainer = Trainer(...)
    muster.transformers.train(trainer, global_batch=64)

Each sample is trained once an epoch, in worlds of whatever sizes, and the batch of all ranks
together stays the same. A script that calls ``trainer.train()`` itself does so within
``with MusterCallback(trainer, global_batch=64)``, from ``last_checkpoint()``;
``MusterCallback(steps_only=True)``, one of the trainer's ``callbacks``, keeps the steps alone.

``output_dir`` has to be a directory that every pod of the job reads and writes. The boundaries are
the optimizer steps, however many gradients each of them accumulates.
"""

from __future__ import annotations

import json
import logging
import os
import re
from types import TracebackType
from typing import Any, Optional, Set, Type

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import TrainOutput

from muster.checkpoints import of_rank_0
from muster.data import ElasticSampler
from muster.draining import Drain, drain
from muster.process import refuse
from muster.resuming import (
    WorldMark,
    check_first,
    is_left_behind,
    last_commit,
    mark,
    marked,
    save_tag,
    shortfall,
)
from muster.saved_steps import CommittedStep
from muster.transformers_data import (
    LATER,
    MODEL_ALONE,
    SHORT,
    TrainerData,
    total_batch,
)
from muster.world.conduct import comes_later

log = logging.getLogger(__name__)

_alone = comes_later(os.environ)
"""Whether this rank has a process group of its own, as it is to come into a world that trains."""
if _alone:  # before the script makes the trainer's arguments
    from muster.world.reentry import stand_alone

    stand_alone()

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class MusterCallback(TrainerCallback):
    """A callback that has the trainer save at the step that all ranks agree on, and waits as told.

    The save is the trainer's own, rotated as all its checkpoints are, with the world's save tag in
    it (``muster-tag``). At that step nothing is evaluated: the time before a pod has to go is for
    the save. If a later world saves to ``output_dir``, ``LaterWorld`` is raised in place of a save.

    A trainer does not call its callbacks if ``train()`` raises: ``with MusterCallback(...)`` around
    it then stops taking part. Without it, a script that goes on after that takes part until it
    trains again, or ends, and a drain waits for it in vain.

    A trainer that is given it twice calls it twice: the second call does nothing.

    Given the ``trainer``, to which it adds itself, and the ``global_batch``, it takes over the
    choice of samples (``self.sampler``): accelerate skips none when training goes on, and gradients
    are accumulated over as many batches as needed, of at most ``per_device_train_batch_size``
    samples. Steps, epochs and schedules are those of the global batch, so they are the same in
    every world; training goes on from a checkpoint of another ``global_batch`` at the sample after
    its last one. The trainer's ``train_sampling_strategy`` stays: "group_by_length" deals each
    global batch by length. ``last`` is that of ``ElasticSampler``; by default it follows
    ``dataloader_drop_last``. ``replace``: take the place of an order that the callback cannot keep,
    as that of a subclass, or of an epoch that was begun without it; samples of that epoch may then
    be trained twice. Raises ``ValueError`` for data without a length, and without ``replace`` for
    such an order.

    ``steps_only``: leave the samples to the trainer, which goes on rightly only where the batch of
    all ranks is the same in every world. Without that and the trainer, ``ValueError`` is raised
    before the first step.
    """

    def __init__(
        self,
        trainer: Optional[Trainer] = None,
        *,
        global_batch: int = 0,
        last: Optional[str] = None,
        replace: bool = False,
        steps_only: bool = False,
    ) -> None:
        self._drain: Optional[Drain] = None
        self._state: Optional[TrainerState] = None
        self._step = -1
        self._data: Optional[TrainerData] = None
        self._mark: Optional[WorldMark] = None
        self._steps_only = steps_only
        self._in_place: Any = None
        """The ``InPlaceTrain`` of the trainer, if its world changes in place."""
        if steps_only and global_batch:
            raise ValueError(
                "MusterCallback: with steps_only=True it keeps no global_batch: leave it out"
            )
        if trainer is None:
            return
        if not steps_only:
            self._data = TrainerData(trainer, global_batch, last, replace=replace)
        trainer.add_callback(self)

    @property
    def sampler(self) -> Optional[ElasticSampler]:
        """The place in the data; None if the callback has not taken the data over."""
        return None if self._data is None else self._data.sampler

    def __enter__(self) -> MusterCallback:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self._leave(kind, error, traceback)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take part in drains from now on; raise ``CheckpointMissing`` before a commit is lost."""
        global _taking_part
        if _taking_part is not None:
            # A train() has a state of its own: this callback, or one like it, is there twice.
            if _taking_part._state is state and (self is _taking_part or self._data is None):
                return
            _taking_part._leave()  # an earlier train() that raised, or one without the data
        if args.save_only_model:
            refuse(ValueError(MODEL_ALONE))
        self._state, self._step = state, state.global_step
        if self._in_place is not None:
            self._drain = self._in_place.world.drain
            self._mark = WorldMark(str(args.output_dir), marks=state.is_world_process_zero)
            self._mark.begin()
            return
        if _alone:
            refuse(ValueError(LATER))
        check_first(
            state.global_step + 1,
            "give train() resume_from_checkpoint=last_checkpoint(%r)" % args.output_dir,
        )
        self._drain = drain()
        self._drain.__enter__()
        _taking_part = self
        self._mark = WorldMark(str(args.output_dir), marks=state.is_world_process_zero)
        self._mark.begin()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise ``ValueError`` if no callback keeps the samples, and none was to keep steps alone.

        Not sooner: of two callbacks, the other one may.
        """
        if self._drain is not None and self._data is None and not self._steps_only:
            self._steps_only = True  # said once
            refuse(ValueError(SHORT % total_batch(args)))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Seed the random numbers of the step from its number and the rank."""
        if self._data is not None:
            self._data.begin_step(state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Come to the boundary after an optimizer step."""
        if state.global_step == self._step:
            return  # called twice, as the trainer has this callback twice
        self._step = state.global_step
        if self._data is not None and self._in_place is None:  # in place it is counted before
            self._data.note(state)
        if self._drain is not None and self._drain.commit_due(state.global_step):
            control.should_save = True
            control.should_evaluate = False
        self._check(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """See before a save at the end of an epoch that no later world saves here."""
        self._check(control)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report the trainer's save, whether a drain or the trainer itself has asked for it."""
        if self._drain is not None:
            if state.is_world_process_zero:
                mark(_path(str(args.output_dir), state.global_step), save_tag())
            sampler = self.sampler
            cursor = None if sampler is None else sampler.cursor
            self._drain.committed(state.global_step, cursor=cursor)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop taking part in drains."""
        self._leave()

    def _train_in_place(self, trainer: Trainer) -> Optional[TrainOutput]:
        """Train in worlds that change in place; None where they cannot."""
        global _alone
        from muster.transformers_in_place import InPlaceTrain
        from muster.world.reentry import FallsBack, changes_in_place, fault_in_place

        assert self._data is not None
        wrong = MODEL_ALONE if trainer.args.save_only_model else fault_in_place(trainer)
        if wrong:
            raise ValueError("muster.transformers.train(in_place=True): " + wrong)
        if not changes_in_place():
            return None
        resume = _newest(str(trainer.args.output_dir), last_commit())
        self._in_place = made = InPlaceTrain(trainer, self._data, resume)
        try:
            found = made.train()
            _alone = False
            return found
        except FallsBack:
            made.withdraw()
            return None
        finally:
            self._in_place = self._drain = None

    def _check(self, control: TrainerControl) -> None:
        """Raise ``LaterWorld`` where the trainer is about to save, and may not."""
        if control.should_save and self._mark is not None:
            self._mark.check()

    def _leave(
        self,
        kind: Optional[Type[BaseException]] = None,
        error: Optional[BaseException] = None,
        traceback: Optional[TracebackType] = None,
    ) -> None:
        global _taking_part
        if self._in_place is not None:
            self._drain = None  # it is the world's
        if self._drain is not None:
            self._drain.__exit__(kind, error, traceback)
            self._drain = None
            _taking_part = None


_taking_part: Optional[MusterCallback] = None
"""The callback whose drain is entered, of any trainer: a process has one at a time."""


def train(
    trainer: Trainer,
    *,
    global_batch: int,
    last: Optional[str] = None,
    replace: bool = False,
    in_place: bool = False,
) -> TrainOutput:
    """Train from the checkpoint of the last commit, or a later whole one; return what it returns.

    Every rank calls it in place of ``trainer.train()``. The options are ``MusterCallback``'s, which
    says what raises ``ValueError``. Raises ``TypeError`` for what is no ``Trainer``.

    ``in_place``: let the world change around the trainer, in the same process, where the sidecars
    can (docs/in-place.md); it needs plain ``DistributedDataParallel``. The output's loss and
    metrics are then of the steps since the last change. Import this module before the trainer's
    arguments are made. Raises ``ValueError`` for a trainer of another kind.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(
            "muster.transformers.train: give it a transformers Trainer, and no %s"
            % type(trainer).__name__
        )
    with MusterCallback(trainer, global_batch=global_batch, last=last, replace=replace) as callback:
        if in_place:
            found = callback._train_in_place(trainer)
            if found is not None:
                return found
        return trainer.train(resume_from_checkpoint=last_checkpoint(str(trainer.args.output_dir)))


def last_checkpoint(output_dir: str) -> Optional[str]:
    """Return the newest whole checkpoint in ``output_dir`` to resume from; None if there is none.

    For ``resume_from_checkpoint``. It skips one that a save left unfinished when its process was
    killed. Every rank must call it, equally often: rank 0 looks, and tells the others. Logs a
    warning if the last commit is not among them: then ``output_dir`` is not the same directory for
    all pods.
    """
    return of_rank_0(lambda: _newest(output_dir, last_commit()))


def _newest(output_dir: str, committed: Optional[CommittedStep]) -> Optional[str]:
    steps: Set[int] = set()
    if committed is not None:
        steps.add(committed)  # by name: a listing may be out of date
    if os.path.isdir(output_dir):
        matches = map(_CHECKPOINT.fullmatch, os.listdir(output_dir))
        steps.update(int(match.group(1)) for match in matches if match)
    whole = [step for step in steps if _is_whole(_path(output_dir, step), step)]
    behind = {s for s in whole if is_left_behind(s, marked(_path(output_dir, s)), committed)}
    if behind:
        log.warning("steps %s are of a world that was cut off: passed over", sorted(behind))
    newest = max((step for step in whole if step not in behind), default=-1)
    missing, _ = shortfall(max(newest, 0), output_dir)
    if missing:
        log.warning("%s", missing)
    return _path(output_dir, newest) if newest >= 0 else None


def _path(output_dir: str, step: int) -> str:
    return os.path.join(output_dir, "checkpoint-%d" % step)


def _is_whole(directory: str, step: int) -> bool:
    """Return whether the trainer's state, which it writes last, is there and of this step."""
    try:
        with open(os.path.join(directory, "trainer_state.json"), encoding="utf-8") as file:
            return bool(json.load(file)["global_step"] == step)
    except (OSError, ValueError, KeyError, TypeError):
        return False
