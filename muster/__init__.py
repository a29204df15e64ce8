# SPDX-License-Identifier: Apache-2.0
"""The library that a training script imports; ``docs/training.md`` shows how to use it.

Standard library only; no cost and no effect if no sidecar runs beside the script. The callbacks for
other libraries are modules of their own: ``muster.transformers`` and ``muster.lightning``.
"""

from muster.batch_plan import BatchPlan, batch_plan
from muster.draining import Drain, drain
from muster.launcher_leave import report_save, save_asked
from muster.learning_rate import scale_lr
from muster.progress import announce, report_step
from muster.resuming import CheckpointMissing, check_start, last_commit
from muster.sharding import Shards, ShardsLost, shards
from muster.tag import save_tag

__version__ = "0.2.0.dev0"

announce()

__all__ = [
    "BatchPlan",
    "CheckpointMissing",
    "Drain",
    "Shards",
    "ShardsLost",
    "batch_plan",
    "check_start",
    "drain",
    "last_commit",
    "report_save",
    "report_step",
    "save_asked",
    "save_tag",
    "scale_lr",
    "shards",
]
