# SPDX-License-Identifier: Apache-2.0
"""Draining for Lightning's ``Trainer``::

    import muster.lightning

    muster.lightning.fit(model, rows, directory="/shared", global_batch=64, max_epochs=3)

Each sample is trained once an epoch, in worlds of whatever sizes. A script that has a ``Trainer``
of its own gives it the nodes of this world, the callback and the sampler::

    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    num_nodes = int(os.environ["WORLD_SIZE"]) // devices
    sampler = ElasticSampler(len(rows), seed=7, global_batch=64)  # of muster.data
    callback = MusterCallback("/shared/checkpoints", sampler)
    trainer = Trainer(..., devices=devices, num_nodes=num_nodes, use_distributed_sampler=False,
                      callbacks=[callback])
    loader = DataLoader(rows, batch_sampler=sampler)
    trainer.fit(model, loader, ckpt_path=last_checkpoint("/shared/checkpoints"))

``MusterCallback(directory, steps_only=True)`` keeps the steps alone. Lightning does not ask
torchrun how many nodes there are, and each world may have another number. The directory has to be
one that every pod of the job reads and writes; let a ``ModelCheckpoint`` for periodic checkpoints
use the same. The boundaries are the optimizer steps, however many batches each accumulates.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Callable, Dict, Mapping, Optional

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader

from muster.checkpoints import of_rank_0
from muster.data import ElasticSampler, seed_step
from muster.draining import Drain, drain
from muster.lightning_files import ASIDE, TAG_KEY, newest, path_of, step_of, superseded
from muster.lightning_loops import (
    SHORT,
    adopt,
    check_loaders,
    end_epoch,
    ended_a_step,
    finish,
    recount,
    take_over,
    weigh,
)
from muster.process import refuse
from muster.progress import own_file
from muster.resuming import WorldMark, check_first, last_commit, save_tag

log = logging.getLogger(__name__)

OWN_LAUNCHER = (
    "Lightning has started the %d ranks of this world itself, so no pod can leave or join it: start"
    " the script with torchrun --nproc-per-node=%d SCRIPT"
)

OF_WORLD = {"accumulate_grad_batches", "devices", "num_nodes", "use_distributed_sampler"}
"""Options of Lightning's ``Trainer`` that ``fit()`` gives."""


class MusterCallback(Callback):
    """A callback that saves at the step that all ranks agree on, and waits there as long as told.

    It saves to ``muster-<step>-<save tag>.ckpt`` in ``directory`` and keeps the newest two. A save
    of a ``ModelCheckpoint`` to the same directory is put on record at the next step. All that the
    trainer saves has the save tag in it. If a later world saves to ``directory``, ``LaterWorld`` is
    raised in place of a save.

    ``sampler``: that of the loader. Its global batch stays the same in worlds of whatever sizes, by
    ``accumulate_grad_batches``, so that steps, epochs and schedules stay as they are; and training
    goes on with the sample after those that the checkpoint was trained on.

    ``steps_only``: leave the samples to the loader. Without that and the sampler, ``ValueError`` is
    raised before the first step.
    """

    def __init__(
        self,
        directory: str,
        sampler: Optional[ElasticSampler] = None,
        *,
        steps_only: bool = False,
    ) -> None:
        if steps_only and sampler is not None:
            raise ValueError(
                "MusterCallback: with steps_only=True it keeps no sampler: leave it out"
            )
        self._directory = directory
        self._steps_only = steps_only
        self.sampler = sampler
        self._cursors: Dict[int, Any] = {}
        self._drain: Optional[Drain] = None
        self._step = -1
        self._told = -1
        self._mark: Optional[WorldMark] = None
        self._taken: Optional[Trainer] = None
        self._in_place: Any = None
        """The ``InPlaceFit`` of the trainer, while its world changes in place."""
        self._unfinished = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take over the sampler; raise ``ValueError`` if the world is not torchrun's.

        Without Lightning's ``num_nodes`` each rank would train alone, and all would save to the
        same files. Ranks that Lightning starts itself stay in the world that they began in.
        """
        self._unfinished = False
        if self.sampler is not None and self._taken is not trainer:
            self._taken = trainer
            take_over(trainer, self.sampler)
        file = own_file()
        if file is None:
            return
        ranks, world_size = file.rank.world_size, trainer.world_size
        if not file.rank.of_torchrun:
            if world_size > 1:
                raise ValueError(OWN_LAUNCHER % (world_size, trainer.num_devices))
            return
        if ranks != world_size:
            raise ValueError(
                "torchrun has started %d ranks, and Lightning trains in a world of %d: give its"
                ' Trainer num_nodes=int(os.environ["WORLD_SIZE"]) // devices' % (ranks, world_size)
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take part in drains from now on.

        Raises ``CheckpointMissing`` before a commit is lost, and ``ValueError`` before samples are.
        """
        if self.sampler is not None:
            check_loaders(trainer, pl_module, self.sampler)
            self.sampler.counted = True
        elif not self._steps_only:
            refuse(ValueError(SHORT))
        self._step = self._told = trainer.global_step
        if self._in_place is not None:
            self._drain = self._in_place.begin()
        else:
            load = "give fit() ckpt_path=last_checkpoint(%r)" % self._directory
            check_first(self._step + 1, load)
            self._drain = drain()
            self._drain.__enter__()
        self._mark = WorldMark(self._directory, marks=trainer.is_global_zero)
        self._mark.begin()
        if self._unfinished:
            finish(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: Dict[str, Any]
    ) -> None:
        """Put the save tag into a checkpoint, unless a later world saves here."""
        in_memory = self._in_place is not None and self._in_place.leaving
        if self._mark is not None and not in_memory:
            self._mark.check()
            checkpoint[TAG_KEY] = save_tag()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Come to the boundary after an optimizer step, if the batch has completed one."""
        step = trainer.global_step
        if step == self._step:
            return
        if self._drain is not None:
            self._tell_saved(trainer)
        self._step = step
        if self.sampler is not None:
            if self._in_place is None:  # in place it is counted before
                self.sampler.advance()
            self._cursors = {step: self.sampler.cursor}
        if self._drain is not None and self._drain.commit_due(step):
            self._save(trainer, step)
            self._drain.committed(step, cursor=self._cursors.get(step))

    def count_again(self) -> None:
        """Accumulate as many micro batches as another division of the samples asks for."""
        self._taken = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed the random numbers of a step from its number and the rank."""
        if self.sampler is not None and batch_idx % self.sampler.plan.accumulation == 0:
            if self._in_place is not None:
                self._in_place.boundary()
            seed_step(self.sampler.seed, trainer.global_step, self.sampler.rank)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """Confirm that the gradients are whole, in a world that changes in place."""
        if self._in_place is not None:
            self._in_place.world.begin_update()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Weigh the loss by the micro batch's number of samples."""
        if self.sampler is not None:
            weigh(trainer, self.sampler, loss)

    def state_dict(self) -> Dict[str, Any]:
        """Return the place in the data, for a checkpoint."""
        if self.sampler is None:
            return {}
        return {"cursor": self.sampler.cursor, "accumulation": self.sampler.plan.accumulation}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: Dict[str, Any]
    ) -> None:
        """Go on from the checkpoint's place in the data, in batches of this world."""
        if trainer.state.fn != "fit":
            return
        state = checkpoint.get("callbacks", {}).get(self.state_key) or {}
        former = state.get("accumulation", trainer.accumulate_grad_batches)
        self._unfinished = ended_a_step(trainer, checkpoint, former)
        if self.sampler is not None and state:
            self.sampler.go_to(state["cursor"])
            recount(checkpoint, state["accumulation"], self.sampler.plan.accumulation)
        elif self.sampler is not None:
            adopt(checkpoint, self.sampler)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the epoch for the sampler, too."""
        end_epoch(trainer, self.sampler)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop taking part in drains."""
        if self._drain is not None:
            self._tell_saved(trainer)
        self._leave()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop taking part in drains; a save that was due has failed."""
        self._leave(exception)

    def _leave(self, error: Optional[BaseException] = None) -> None:
        if self._in_place is not None:
            self._drain = None  # it is the world's
        if self._drain is not None:
            traceback = None if error is None else error.__traceback__
            self._drain.__exit__(None if error is None else type(error), error, traceback)
            self._drain = None

    def _fit_in_place(
        self, trainer: Trainer, model: LightningModule, begin: Callable[[Optional[str]], None]
    ) -> bool:
        """Fit in worlds that change in place; False where they cannot.

        ``begin``: calls ``fit()`` with the path of a checkpoint.
        """
        from muster.lightning_loops import InPlaceFit, fault_in_place
        from muster.world.reentry import FallsBack, changes_in_place

        wrong = fault_in_place(trainer, model)
        if wrong:
            raise ValueError("muster.lightning.fit(in_place=True): " + wrong)
        if not changes_in_place():
            return False
        committed = last_commit()
        path = newest(self._directory, committed)
        step = 0 if path is None else step_of(path) or int(committed or 0)
        self._in_place = InPlaceFit(self, trainer, model, path, step)
        try:
            self._in_place.fit(begin)
        except FallsBack:
            return False
        finally:
            self._in_place = self._drain = None
        return True

    def _tell_saved(self, trainer: Trainer) -> None:
        """Report the saves of each ``ModelCheckpoint`` since the last step.

        Lightning calls this callback before them, so their save of a step is seen at the next one.
        A save that is still written in the background is not reported, nor one without the
        optimizer.
        """
        if self._drain is None or isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO):
            return
        for callback in trainer.checkpoint_callbacks:
            step = getattr(callback, "_last_global_step_saved", self._told)
            path = str(getattr(callback, "_last_checkpoint_saved", ""))
            beside = os.path.dirname(os.path.abspath(path)) == os.path.abspath(self._directory)
            whole = not getattr(callback, "save_weights_only", True)
            # A checkpoint that is not among the best is deleted at once; only rank 0 is sure to see
            # that.
            there = not trainer.is_global_zero or os.path.exists(path)
            if step > self._told and beside and whole and there:
                self._told = step
                self._drain.committed(step, cursor=self._cursors.get(step))

    def _save(self, trainer: Trainer, step: int) -> None:
        """Write a checkpoint aside and rename it, so that a kill leaves no partial one."""
        tag = save_tag()
        path = path_of(self._directory, step, tag)
        aside = path + ASIDE
        trainer.save_checkpoint(aside)
        trainer.strategy.checkpoint_io.teardown()  # waits for a write in the background
        if not trainer.is_global_zero:
            return
        if not os.path.exists(aside):  # Lightning skips a directory that it may not write to
            raise PermissionError("%s could not be written" % aside)
        if os.path.isdir(path):  # of a failed attempt at this very step
            trainer.strategy.remove_checkpoint(path)
        os.replace(aside, path)
        for needless in superseded(self._directory, tag):
            trainer.strategy.remove_checkpoint(needless)


def fit(
    model: LightningModule,
    data: Any,
    *,
    directory: str,
    global_batch: int,
    micro_batch: Optional[int] = None,
    seed: int = 0,
    last: str = "short",
    shuffle: bool = True,
    save_every: int = 500,
    validation: Any = None,
    loader: Optional[Mapping[str, Any]] = None,
    in_place: bool = False,
    **trainer: Any,
) -> Trainer:
    """Fit ``model`` from the checkpoint of the last commit, or a later whole one.

    It makes the loader, the callback and the ``Trainer``, which it returns. ``data`` has a length,
    and rows by number. ``save_every``: optimizer steps between two periodic checkpoints, unless a
    ``ModelCheckpoint`` is among the ``callbacks``. ``validation``: Lightning's ``val_dataloaders``.
    ``loader``: options of torch's ``DataLoader``; ``trainer``: those of Lightning's
    ``Trainer``. The others are ``ElasticSampler``'s. ``in_place``: let the world change around the
    trainer, in the same process, where the sidecars can (docs/in-place.md); it needs Lightning's
    "ddp". Raises ``ValueError`` for an option that
    follows from the world, and as ``MusterCallback`` does.
    """
    taken = sorted(trainer.keys() & OF_WORLD)
    if taken:
        raise ValueError(
            "muster.lightning.fit: leave out %s, which follow from the world" % ", ".join(taken)
        )
    if isinstance(data, DataLoader):
        raise ValueError(
            "muster.lightning.fit: the data are a DataLoader, and it makes its own: give it that"
            " one's dataset, and loader={...} for its options"
        )
    sampler = ElasticSampler(
        len(data),
        seed,
        global_batch=global_batch,
        micro_batch=micro_batch,
        last=last,
        shuffle=shuffle,
    )
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    callback = MusterCallback(directory, sampler)
    if in_place:
        trainer.setdefault("strategy", "ddp")
    callbacks = [*trainer.pop("callbacks", ()), callback]
    if not any(isinstance(one, ModelCheckpoint) for one in callbacks):
        callbacks.append(ModelCheckpoint(directory, every_n_train_steps=save_every))
    made = Trainer(
        devices=devices,
        num_nodes=int(os.environ.get("WORLD_SIZE", "1")) // devices,
        use_distributed_sampler=False,
        callbacks=callbacks,
        **trainer,
    )
    batches: DataLoader[Any] = DataLoader(data, batch_sampler=sampler, **(loader or {}))

    def begin(path: Optional[str]) -> None:
        made.fit(model, batches, validation, ckpt_path=path)

    if not (in_place and callback._fit_in_place(made, model, begin)):
        begin(last_checkpoint(directory))
    return made


def last_checkpoint(directory: str) -> Optional[str]:
    """Return the checkpoint in ``directory`` to go on from, for ``ckpt_path``; None without one.

    It is that of the last commit, unless one of a later step is proven to be whole: an interrupted
    save may leave part of a file. Every rank must call it, equally often: rank 0 looks, and tells
    the others. Logs a warning for each file that it skips, and if the last commit is not there.
    """
    return of_rank_0(lambda: newest(directory, last_commit()))
