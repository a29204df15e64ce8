# SPDX-License-Identifier: Apache-2.0
"""The progress of the ranks with a data set that is handed out in shards: pure."""

from __future__ import annotations

from rdzv.dataclass import dataclass
from rdzv.intervals import Intervals, common, length, union
from rdzv.shards.ledger import ShardLedger


@dataclass(frozen=True, slots=True)
class ShardProgress:
    """The progress of one epoch, in shards, of which pieces count as parts.

    ``open``: no rank has them. ``leased``: ranks hold them, and have not trained them as far as is
    known. ``trained``: in no save of all ranks yet. ``done``: in one.
    """

    epoch: int
    open: float
    leased: float
    trained: float
    done: float


def progress(ledger: ShardLedger) -> ShardProgress | None:
    """Measure the oldest epoch that is begun and not trained; return None if none is handed out."""
    if ledger.world is None or ledger.unreadable:
        return None
    plan, shards = ledger.world.plan, ledger.open
    held = union(*(share.held for share in ledger.shares()))
    out = union(shards.again, held)
    newest = max(0, shards.frontier - 1)
    epoch = (out[0][0] if out else newest) // plan.epoch_length
    (low, high) = plan.epoch_places(epoch)[0]
    ahead = ((max(low, shards.frontier), high),) if shards.frontier < high else ()
    unsaved = [
        union(share.used, *(save.places for save in ledger.unsealed(share)))
        for share in ledger.shares()
    ]

    def shards_of(places: Intervals) -> float:
        return length(common(places, ((low, high),))) / plan.shard_size

    is_open, leased = shards_of(union(shards.again, ahead)), shards_of(held)
    trained = shards_of(union(*unsaved))
    done = (high - low) / plan.shard_size - is_open - leased - trained
    return ShardProgress(epoch, is_open, leased, trained, max(0.0, done))


def warning(name: str, ledger: ShardLedger) -> str:
    """Return a warning that records may be trained once more, and what to do; empty for none."""
    step = ledger.trained.unknown
    if not step:
        return ""
    return (
        f"shards of {name}: nothing was on record of what the weights of step {step} contain, as in"
        " a store that has lost its data: epochs are handed out from their beginning; restore the"
        " store from its backup, or begin with the epoch after the last one that is trained, or"
        " start from step 0"
    )
