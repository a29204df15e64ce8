# SPDX-License-Identifier: Apache-2.0
"""Draining for Lightning's ``Trainer``::

    from muster.lightning import MusterCallback, last_checkpoint

    trainer = Trainer(..., callbacks=[MusterCallback("/shared/checkpoints")])
    trainer.fit(model, data, ckpt_path=last_checkpoint("/shared/checkpoints"))

The directory has to be one that every pod of the job reads and writes; let a ``ModelCheckpoint``
for periodic checkpoints use the same. The boundaries are the optimizer steps, however many batches
each of them accumulates.
"""

from __future__ import annotations

import glob
import logging
import os
from typing import Any, Optional

from lightning.pytorch import Callback, LightningModule, Trainer

from muster.draining import Drain, drain, last_commit

log = logging.getLogger(__name__)

KEPT = 2
"""How many of the callback's own checkpoints stay: an older one until the next is whole."""


class MusterCallback(Callback):
    """Saves at the step that all ranks agree on, and waits there as long as told.

    ``directory`` is given ``muster-<step>.ckpt``; the newest two of them are kept.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._drain: Optional[Drain] = None
        self._step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take part from now on."""
        self._step = trainer.global_step
        self._drain = drain()
        self._drain.__enter__()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Come to the boundary after an optimizer step; not after a batch that was accumulated."""
        step = trainer.global_step
        if self._drain is None or step == self._step:
            return
        self._step = step
        if self._drain.commit_due(step):
            self._save(trainer, step)
            self._drain.committed(step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take part no longer."""
        if self._drain is not None:
            self._drain.__exit__(None, None, None)
            self._drain = None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Take part no longer; a save that was due has failed."""
        if self._drain is not None:
            self._drain.__exit__(type(exception), exception, exception.__traceback__)
            self._drain = None

    def _save(self, trainer: Trainer, step: int) -> None:
        path = _path(self._directory, step)
        trainer.save_checkpoint(path)
        if not trainer.is_global_zero:
            return
        if not os.path.exists(path):  # Lightning passes over a directory that it may not write to
            raise PermissionError("%s could not be written" % path)
        own = glob.glob(os.path.join(glob.escape(self._directory), "muster-*.ckpt"))
        for older in sorted(own, key=os.path.getmtime)[:-KEPT]:
            trainer.strategy.remove_checkpoint(older)


def last_checkpoint(directory: str) -> Optional[str]:
    """The newest whole checkpoint in ``directory``, for ``ckpt_path``; None if there is none.

    Warns where the last commit is newer than all of them: then ``directory`` is not the same one
    for all pods.
    """
    found = set(glob.glob(os.path.join(glob.escape(directory), "*.ckpt")))
    committed = last_commit()
    if committed is not None:
        found.add(_path(directory, committed))  # by name: a listing may be out of date
    whole = [path for path in found if os.path.isfile(path) or _is_whole(path)]
    if committed is not None and not whole:
        log.warning(
            "all ranks have saved step %d, but there is no checkpoint in %s: is it a directory that"
            " all pods share?",
            committed,
            directory,
        )
    return max(whole, key=os.path.getmtime, default=None)


def _path(directory: str, step: int) -> str:
    return os.path.join(directory, "muster-%d.ckpt" % step)


def _is_whole(sharded: str) -> bool:
    """Whether the part of a sharded checkpoint is there that is written last."""
    return os.path.exists(os.path.join(sharded, "meta.pt"))
