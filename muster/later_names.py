# SPDX-License-Identifier: Apache-2.0
"""Names of ``muster`` that are imported when a script first uses them, and names of 0.1.0.

Those of 0.1.0 work in this release, and warn what to write instead.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

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


def of_muster(name: str) -> Any:
    """Return an attribute of ``muster`` that is not imported with it; raises ``AttributeError``."""
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
