# SPDX-License-Identifier: Apache-2.0
"""The order of the samples of an epoch: the same in every world."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

from muster.bijection import Bijection

KINDS = {"shuffle": "rows (ElasticSampler)", "stream": "a stream of shards (shard_stream)"}
"""The kinds of order, by the name under which a cursor has the facts of one."""


class RowOrder:
    """The rows of a data set, shuffled by seed and epoch, or as they lie.

    ``facts``: what the order follows from, besides the number of samples and the seed; part of each
    cursor.
    """

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        self.facts: Dict[str, Any] = {"shuffle": shuffle}
        self._size, self._seed = size, seed

    def of_epoch(self, epoch: int) -> Any:
        """Return the order of the samples of an epoch."""
        if not self.facts["shuffle"]:
            return PlainOrder()
        return Bijection(self._size, "%d:%d" % (self._seed, epoch))


class PlainOrder:
    """All samples in their own order."""

    def at(self, places: Sequence[int]) -> List[int]:
        """Return the samples at these places."""
        return [int(place) for place in places]


def difference(cursor: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return how the order that a cursor is of differs from the one of the ``own`` facts; or "".

    Nothing is known of a cursor without such facts, as an older one.
    """
    then = {kind: cursor[kind] for kind in KINDS if kind in cursor}
    if not then or then == own:
        return ""
    (kind,) = own
    if kind not in then:
        was = next(KINDS[other] for other in then)
        return "the cursor is of %s, and this is %s" % (was, KINDS[kind])
    pairs = [(facts[kind] if kind == "stream" else facts) for facts in (then, own)]
    names = [name for name in {**pairs[0], **pairs[1]} if pairs[0].get(name) != pairs[1].get(name)]
    named = [name for name in names if name != "records"]
    if not named:
        return "the cursor is of shards with other numbers of records"
    listed = [", ".join("%s=%s" % (name, one.get(name)) for name in named) for one in pairs]
    return "the cursor is of an order with %s, and this one has %s" % (listed[0], listed[1])
