# SPDX-License-Identifier: Apache-2.0
"""Whether the store knows what the weights of a step contain, of data sets in shards: pure.

A rank says that a step is saved once it is on record which shards that contains. So it is unknown
only where the store was restored to before the save, though the ranks may tell of it once more.
The world after that would be refused shards from such a step, and be sent to it again and again.
"""

from __future__ import annotations

from collections.abc import Iterable

from rdzv.drain.inputs import LiveRound
from rdzv.shards.ledger import ShardLedger, as_of


def is_known(step: int, round: LiveRound, ledgers: Iterable[ShardLedger]) -> bool:
    """Whether a world could begin from ``step``, which all ranks of ``round`` have saved.

    Where the store has lost this world, it may have lost that this one trains a data set, too.
    """
    here = (round.run, round.number)
    return all(
        as_of(ledger, step) is not None
        for ledger in ledgers
        if (world := ledger.world) is not None
        and (round.restored or (world.run, world.round) == here)
    )
