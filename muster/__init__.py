# SPDX-License-Identifier: Apache-2.0
"""The library that a training script imports; ``docs/training.md`` shows how to use it.

Standard library only; no cost and no effect if no sidecar runs beside the script. ``train`` is the
one name that needs torch. What concerns samples is in ``muster.data``, one call for each trainer in
``muster.transformers`` and ``muster.lightning``, what elastic Horovod needs in ``muster.horovod``.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from muster.draining import Drain, drain
from muster.progress import report_step
from muster.resuming import CheckpointMissing, last_commit, save_tag
from muster.saved_steps import CommittedStep
from muster.waiting import announce

if TYPE_CHECKING:
    from muster.batches import BatchPlan as BatchPlan
    from muster.batches import batch_plan as batch_plan
    from muster.batches import scale_lr as scale_lr
    from muster.horovod import committed as report_save  # noqa: F401
    from muster.horovod import save_asked as save_asked
    from muster.resuming import LaterWorld
    from muster.resuming import check_start as check_start
    from muster.sharding import Shards as Shards
    from muster.sharding import ShardsLost as ShardsLost
    from muster.sharding import shards as shards
    from muster.training import Training, train

__version__ = "0.2.0.dev0"

announce()

__all__ = [
    "CheckpointMissing",
    "CommittedStep",
    "Drain",
    "LaterWorld",
    "Training",
    "drain",
    "last_commit",
    "report_step",
    "save_tag",
    "train",
]

LATER = {
    "LaterWorld": "muster.resuming",
    "Training": "muster.training",
    "train": "muster.training",
}
"""The module of each name that costs more to import than a drain needs."""

FORMER = {
    "BatchPlan": ("muster.batches", "muster.data.BatchPlan"),
    "Shards": ("muster.sharding", "muster.data.Shards"),
    "ShardsLost": ("muster.sharding", "muster.data.ShardsLost"),
    "batch_plan": ("muster.batches", "muster.data.batch_plan(...)"),
    "check_start": ("muster.resuming", "with muster.drain(start=step, where=directory)"),
    "report_save": ("muster.horovod", "muster.horovod.committed(step)"),
    "save_asked": ("muster.horovod", "muster.horovod.commit_due(step)"),
    "scale_lr": ("muster.batches", "muster.data.scale_lr(...)"),
    "shards": ("muster.sharding", "muster.data.shards(...)"),
}
"""The module of each name of 0.1.0, and what to write instead."""

RENAMED = {"report_save": "committed"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a name when a script first uses it; those of 0.1.0 warn what to write instead."""
        if name in LATER:
            return getattr(import_module(LATER[name]), name)
        if name not in FORMER:
            raise AttributeError("module 'muster' has no attribute %r" % name)
        module, instead = FORMER[name]
        warnings.warn(
            "muster.%s goes with the next release: write %s" % (name, instead),
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(import_module(module), RENAMED.get(name, name))
