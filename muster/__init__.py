# SPDX-License-Identifier: Apache-2.0
"""The library that a training script imports; ``docs/training.md`` shows how to use it.

Standard library only; no cost and no effect if no sidecar runs beside the script. ``train`` is the
one name that needs torch. What concerns samples is in ``muster.data``, one call for each trainer in
``muster.transformers`` and ``muster.lightning``, what elastic Horovod needs in ``muster.horovod``.
"""

from typing import TYPE_CHECKING

from muster.draining import Drain, drain
from muster.progress import announce, report_step
from muster.resuming import CheckpointMissing, last_commit, save_tag
from muster.saved_steps import CommittedStep

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
else:
    from muster.later_names import of_muster as __getattr__  # noqa: F401

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
