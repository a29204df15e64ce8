# SPDX-License-Identifier: Apache-2.0
"""The order of the samples of an epoch: the same in every world."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence, Tuple

from muster.bijection import Bijection

KINDS = {"shuffle": "rows (ElasticSampler)", "stream": "a stream of shards (shard_stream)"}
"""The kinds of order, by the name under which a cursor has the facts of one."""


class RowOrder:
    """The rows of a data set, shuffled by seed and epoch, or as they lie.

    ``sizes``: the number of rows with which the epoch has begun, and those that it has grown to
    since. ``facts``: what the order follows from, besides these and the seed; part of each cursor.
    """

    def __init__(self, sizes: Sequence[int], seed: int, shuffle: bool) -> None:
        self.facts: Dict[str, Any] = {"shuffle": shuffle}
        self.sizes, self._seed = tuple(sizes), seed

    def of_sizes(self, sizes: Sequence[int]) -> RowOrder:
        """Return the order of other sizes."""
        return RowOrder(sizes, self._seed, self.facts["shuffle"])

    def of_epoch(self, epoch: int) -> Any:
        """Return the order of the samples of an epoch: those it has grown by come last."""
        if not self.facts["shuffle"]:
            return PlainOrder()
        key = "%d:%d" % (self._seed, epoch)
        first, low = Bijection(self.sizes[0], key), self.sizes[0]
        pieces = [(0, low, first)]
        for high in self.sizes[1:]:
            pieces.append((low, high, Bijection(high - low, "%s:%d" % (key, low))))
            low = high
        return first if len(pieces) == 1 else GrownOrder(pieces)


class GrownOrder:
    """Several orders one behind the other, each of the samples from ``low`` to ``high``."""

    def __init__(self, pieces: Sequence[Tuple[int, int, Bijection]]) -> None:
        self._pieces = pieces

    def at(self, places: Sequence[int]) -> List[int]:
        """Return the samples at these places."""
        wanted, found = [int(place) for place in places], [0] * len(places)
        for low, high, order in self._pieces:
            inside = [at for at, place in enumerate(wanted) if low <= place < high]
            for number, sample in enumerate(order.at([wanted[at] - low for at in inside])):
                found[inside[number]] = low + sample
        return found


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


def other_data(then: Sequence[int], seed: int, size: int, own_seed: int, grows: bool) -> str:
    """Return why a cursor is not of these ``size`` rows, and what to write; or "".

    ``then``: the sizes that the cursor names. ``grows``: the rows may have become more since.
    """
    if sorted(set(then)) != list(then):
        return "the cursor is of data that has become smaller: %s" % (list(then),)
    if seed == own_seed and (then[-1] == size or (then[-1] < size and grows)):
        return ""
    said = (
        "the cursor is of %d samples in the order of seed %d, and these are %d of seed %d: give the"
        " data and the seed that training has begun with" % (then[-1], seed, size, own_seed)
    )
    if seed != own_seed or size < then[-1]:
        return said
    return said + (
        "; in a loop of your own and muster.train, grows=True goes on if samples were added behind"
        " the %d that are unchanged" % then[-1]
    )
