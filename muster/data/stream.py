# SPDX-License-Identifier: Apache-2.0
"""Data in numbered shards: a stream with a cursor, in a world of any size."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from itertools import accumulate
from typing import Any, Callable, Iterable, Iterator, List, Sequence, Tuple

from muster.batches import MicroBatch
from muster.data.loader import iterable_kind, worker
from muster.data.sampler import Batch, ElasticSampler
from muster.orders import Bijection

Record = Tuple[int, int]
"""The number of a shard, and the number of the record in it."""

Read = Callable[[int, int, int], Iterable[Any]]


class LaneOrder:
    """The records of an epoch: the shards shuffled, read in several lanes side by side.

    The shards are put one after the other and cut into lanes of equal length; a batch takes as many
    records of each lane, one after the other. So most of a share is read in a row, and a batch
    mixes several shards.
    """

    def __init__(self, records: Sequence[int], key: str, batch: int, lanes: int) -> None:
        self._shards = Bijection(len(records), key).at(range(len(records)))
        self._ends = list(accumulate(records[shard] for shard in self._shards))
        size = self._ends[-1]
        self._starts = [size * lane // lanes for lane in range(lanes + 1)]
        self._each = batch // lanes
        self._rows = size // lanes // self._each
        """The number of batches that take as much of each lane; the rest is read lane by lane."""
        rest = [
            self._starts[lane + 1] - self._starts[lane] - self._rows * self._each
            for lane in range(lanes)
        ]
        self._rest_ends = list(accumulate(rest))
        self._rest = rest
        self._batch = batch

    def at(self, places: Sequence[int]) -> List[Record]:
        """Return the records at these places."""
        return [self._record(int(place)) for place in places]

    def _record(self, place: int) -> Record:
        row, inside = divmod(place, self._batch)
        if row < self._rows:
            lane, number = divmod(inside, self._each)
            at = self._starts[lane] + row * self._each + number
        else:
            left = place - self._rows * self._batch
            lane = bisect_right(self._rest_ends, left)
            before = self._rest_ends[lane] - self._rest[lane]
            at = self._starts[lane] + self._rows * self._each + left - before
        shard = bisect_right(self._ends, at)
        return self._shards[shard], at - (self._ends[shard - 1] if shard else 0)


class StreamOrder:
    """The shards of a stream, shuffled by seed and epoch.

    ``facts``: as of ``RowOrder``. The batch is one of them in lanes alone: in one lane the records
    stand in the same order in batches of any size.
    """

    def __init__(self, records: Sequence[int], seed: int, batch: int, lanes: int) -> None:
        self.records = tuple(map(int, records))
        digest = hashlib.blake2b(repr(self.records).encode(), digest_size=4).hexdigest()
        self.facts = {"stream": {"shards": len(records), "records": digest, "lanes": lanes}}
        if lanes > 1:
            self.facts["stream"]["global_batch"] = batch
        self._seed, self._batch, self._lanes = seed, batch, lanes

    def of_epoch(self, epoch: int) -> LaneOrder:
        """Return the order of the records of an epoch."""
        return LaneOrder(self.records, "%d:%d" % (self._seed, epoch), self._batch, self._lanes)


class ShardStream:
    """A stream that ``shard_stream`` makes: yields this rank's micro batches, as lists of records.

    ``sampler`` has the cursor. If the script uses torch, it is an ``IterableDataset``.
    """

    def __init__(self, read: Read, sampler: ElasticSampler) -> None:
        self.sampler = sampler
        self._read = read

    def __reduce__(self) -> Tuple[Any, ...]:
        """Pickle the stream for a loader's workers that are not forked, as from Python 3.14 on."""
        return _stream, (self._read, self.sampler)

    def __len__(self) -> int:
        """Return the number of micro batches in a whole epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[List[Any]]:
        number, many = worker()
        for at, batch in enumerate(self.sampler):
            if at % many == number:  # the loader takes from its workers in turn
                yield self._fetch(batch)

    def follow(self, loader: Iterable[Batch]) -> Iterator[Tuple[Batch, MicroBatch]]:
        """Iterate over ``loader``'s batches with their parts, as ``ElasticSampler.follow``.

        ``loader`` is this stream, or ``DataLoader(stream, batch_size=None, ...)``. Raises
        ``ValueError`` if it has persistent workers: they would go on from where they were.
        """
        if getattr(loader, "persistent_workers", False):
            raise ValueError(
                "shard_stream: a DataLoader with persistent_workers does not see where the cursor"
                " is: leave persistent_workers out"
            )
        return self.sampler.follow(loader)

    def _fetch(self, batch: Sequence[Record]) -> List[Any]:
        """Read records, consecutive ones of a shard in one call."""
        found: List[Any] = []
        start = 0
        for end in range(1, len(batch) + 1):
            shard, record = batch[start]
            if end == len(batch) or batch[end] != (shard, record + end - start):
                found.extend(self._read(shard, record, record + end - start))
                start = end
        return found


def shard_stream(
    records: Sequence[int],
    read: Read,
    seed: int = 0,
    *,
    global_batch: int,
    lanes: int = 1,
    **options: Any,
) -> ShardStream:
    """Stream the records of numbered shards, each once an epoch, in a world of any size.

    ``records``: the number of records of each shard, by its number. ``read(shard, start, stop)``
    returns these records of it. ``lanes``: the number of places that a batch is read from, a
    divisor of ``global_batch``; more lanes mix better and read less in a row. ``options`` are those
    of ``ElasticSampler``.

    Raises ``ValueError`` if there are no records, or ``lanes`` does not divide ``global_batch``.
    """
    if options.get("grows"):
        raise ValueError("shard_stream: grows=True is for rows; shards may change between epochs")
    if lanes < 1 or global_batch % lanes or min(records, default=0) < 0 or not sum(records):
        raise ValueError(
            "shard_stream: give the number of records of each shard, and lanes=%s that divide"
            " global_batch=%s" % (lanes, global_batch)
        )
    sampler = ElasticSampler(sum(records), seed, global_batch=global_batch, **options)
    sampler.order = StreamOrder(records, seed, global_batch, lanes)
    return _stream(read, sampler)


def _stream(read: Read, sampler: ElasticSampler) -> ShardStream:
    stream: ShardStream = iterable_kind(ShardStream)(read, sampler)
    return stream
