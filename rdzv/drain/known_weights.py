# SPDX-License-Identifier: Apache-2.0
"""The store's knowledge of what the weights of a step contain, of data sets in shards: pure.

A rank reports that a step is saved once the store has which shards that contains. So it is unknown
only if the store was restored to a revision before the save, though the ranks may report it once
more. The world after that would be refused shards from such a step, and be sent to it again and
again.
"""

from __future__ import annotations

from collections.abc import Iterable

from rdzv.drain.inputs import LiveRound
from rdzv.shards.ledger import ShardLedger, as_of


def is_known(step: int, round: LiveRound, ledgers: Iterable[ShardLedger]) -> bool:
    """Return whether a world could begin from ``step``, which all ranks of ``round`` have saved.

    A store that has lost this world may also have lost that it trains a data set.
    """
    here = (round.run, round.number)
    return all(
        as_of(ledger, step) is not None
        for ledger in ledgers
        if (world := ledger.world) is not None
        and (round.restored or (world.run, world.round) == here)
    )
