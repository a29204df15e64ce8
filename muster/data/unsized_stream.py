# SPDX-License-Identifier: Apache-2.0
"""A stream of shards of unknown length, each sample once an epoch, in a world of any size.

    stream = elastic_stream(load_dataset(..., streaming=True), batch_size=16, seed=7)
    stream.load(folder, cursor)
    for batch in stream.follow(DataLoader(stream, batch_size=None, num_workers=2)): ...

The data set is one that can be cut into its shards and knows its place in each, as that of Hugging
Face's ``datasets``. Which rank reads which shards follows from the positions of all ranks, so a
shard that is half read goes on at its position, whoever has read it before. Each batch carries the
positions after it: what a loader's workers have read ahead is not trained.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from operator import index
from typing import (
    Any,
    Callable,
    Deque,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Set,
    Tuple,
    Union,
)

from muster.data.loader import hidden, inexact, iterable_kind, not_streamable, worker
from muster.orders import ShardOrder
from muster.process import own_world, refuse
from muster.resuming import save_tag
from muster.shard_log import Positions, StreamSave, path_of, read_positions, share, write_positions

log = logging.getLogger(__name__)

IDLE_BATCHES = 1000
"""Empty batches in a row after which a rank is warned that nothing ends its epoch."""

Folder = Union[str, "os.PathLike[str]"]
Collate = Callable[[List[Any]], Any]


class After:
    """The traces of a batch: ``states`` of the shards that it read, None for those at their
    end. No loader converts it, as it would a dict.
    """

    def __init__(self, epoch: int, records: int, states: Dict[int, Any]) -> None:
        self.epoch, self.records, self.states = epoch, records, states


class Lane(NamedTuple):
    """One shard that is being read."""

    place: int
    part: Any
    records: Iterator[Any]


class ElasticStream:
    """The result of ``elastic_stream``; if the script uses torch, it is an ``IterableDataset``.

    ``epoch`` is the present one, from 0; ``done`` whether this rank has no more of it.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        seed: Optional[int],
        lanes: int,
        collate: Optional[Collate],
        name: str,
        world: Tuple[int, int],
    ) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._order = ShardOrder(dataset.num_shards, 1, seed)
        self._lanes = lanes
        self._collate = collate
        self._name = name
        self.rank, self.world_size = world
        self._turn = 0
        self._placed = False
        self._go_on(Positions(0, frozenset(), {}))

    def _go_on(self, positions: Positions) -> None:
        self.epoch = positions.epoch
        self.done = False
        self._ended: Set[int] = set(positions.ended)
        self._mine = share(positions, self._order.size, self.rank, self.world_size)
        begun = positions.begun
        self._begun: Dict[int, Any] = {
            place: begun[place] for place in self._mine if place in begun
        }

    def __reduce__(self) -> Tuple[Any, ...]:
        """Pickle the stream for a loader's workers that are not forked."""
        return _restored, (self.__dict__,)

    def __iter__(self) -> Iterator[Any]:
        number, many = worker()
        left = [place for place in self._mine if place not in self._ended][number::many]
        return StreamReading(self._read(left, dict(self._begun)), self._placed)

    def follow(self, loader: Any) -> Iterator[Any]:
        """Yield each batch to the end of the epoch, then empty ones until ``end_epoch``.

        ``loader``: ``DataLoader(stream, batch_size=None, ...)``, or the stream itself. Ranks come
        to their last records at different steps; one without records takes part in what all do. So
        add up ``done`` over all ranks in each step, and call ``end_epoch`` where it is true for
        all. A batch counts as trained once it is yielded. Raises ``ValueError`` if ``loader`` reads
        something else, or keeps workers that would not see where the stream is.
        """
        wrong = self._fault(loader)
        if wrong:
            raise ValueError("stream.follow(loader): " + wrong)
        return self._follow(loader)

    def _follow(self, loader: Any) -> Iterator[Any]:
        self._turn += 1
        turn, epoch, idle = self._turn, self.epoch, 0
        for batch, after in loader:
            if turn != self._turn or after.epoch != self.epoch:
                raise RuntimeError("stream.follow(): the stream was moved while a loop followed it")
            for place, state in after.states.items():
                self._begun[place] = state
                if state is None:
                    self._ended.add(place)
                    del self._begun[place]
            if after.records:
                yield batch
        self.done = turn == self._turn and epoch == self.epoch
        while turn == self._turn and epoch == self.epoch:
            idle += 1
            if idle == IDLE_BATCHES:
                log.warning(
                    "this rank has trained its part of epoch %d, and has been given %d empty"
                    " batches since: call stream.end_epoch() in the step in which stream.done is"
                    " true for all ranks",
                    epoch,
                    idle,
                )
            yield self._made([])

    def end_epoch(self) -> None:
        """Go to the next epoch, once ``done`` is true for all ranks; before the step is saved.

        Raises ``RuntimeError`` if this rank has not trained its part.
        """
        if not self.done:
            raise RuntimeError(
                "stream.end_epoch(): this rank has not trained its part of epoch %d: call it where"
                " stream.done is true for all ranks" % self.epoch
            )
        self._go_on(Positions(self.epoch + 1, frozenset(), {}))

    def save(self, folder: Folder, step: int) -> Dict[str, Any]:
        """Write this rank's positions into the checkpoint ``folder`` of ``step``; return a cursor.

        Every rank calls it, with a folder that all share, and gives the cursor to
        ``drain.committed``: it is the same on all ranks, and names these files. Raises ``OSError``.
        """
        save = self._save(index(step))
        os.makedirs(folder, exist_ok=True)
        path = path_of(os.fspath(folder), self._name, self.rank)
        write_positions(
            path, save, self.rank, Positions(self.epoch, frozenset(self._ended), self._begun)
        )
        return save.cursor

    def load(self, folder: Optional[Folder], cursor: Optional[Mapping[str, Any]] = None) -> None:
        """Go on from the positions of all ranks in ``folder``; None: from the beginning.

        ``cursor``: that of the commit which is loaded; without it the files alone decide, as for a
        checkpoint that is newer than the last commit. Raises ``ValueError`` if a file is missing,
        or they are not of one save, not of this data and seed, or not those that ``cursor`` names.
        """
        if folder is None and cursor is not None:
            raise ValueError("stream.load(None, %r): give the folder of that commit" % (cursor,))
        positions = Positions(0, frozenset(), {})
        if folder is not None:
            save, positions = read_positions(os.fspath(folder), self._name)
            mine = self._order
            if (save.shards, save.seed) != (mine.size, mine.seed):
                raise ValueError(
                    "the positions in %s are of %d shards in the order of seed %s, and these are %d"
                    " of seed %s: give the data and the seed that training has begun with"
                    % (folder, save.shards, save.seed, mine.size, mine.seed)
                )
            if cursor is not None and dict(cursor) != save.cursor:
                raise ValueError(
                    "the commit refers to %s, and the positions in %s are of %s: load the"
                    " checkpoint of that commit" % (dict(cursor), folder, save.cursor)
                )
        self._turn += 1
        self._placed = True
        self._go_on(positions)

    def _save(self, step: int) -> StreamSave:
        order = self._order
        return StreamSave(self.epoch, step, self.world_size, order.size, order.seed, save_tag())

    def _fault(self, loader: Any) -> str:
        if loader is self:
            return ""
        right = "give DataLoader(stream, batch_size=None, ...)"
        if getattr(loader, "dataset", None) is not self:
            return "%s does not read this stream: %s" % (type(loader).__name__, right)
        if loader.batch_size is not None:
            return "the stream makes the batches, of its batch_size: " + right
        if loader.persistent_workers:
            return "workers that persist do not see where the stream is: leave out that option"
        if getattr(loader, "snapshot_every_n_steps", 1) != 1:
            return "a loader's state of an earlier batch skips some: snapshot_every_n_steps=1"
        return ""

    def _made(self, records: List[Any]) -> Any:
        return records if self._collate is None else self._collate(records)

    def _read(self, places: List[int], begun: Mapping[int, Any]) -> Iterator[Tuple[Any, After]]:
        """Yield the records of these places in batches, each with the positions after it."""
        lanes: Deque[Lane] = deque()
        left = iter(places)
        while True:
            records: List[Any] = []
            read_positions: Dict[int, Any] = {}
            ended: Dict[int, Any] = {}
            with hidden():
                while len(records) < self._batch_size:
                    while len(lanes) < self._lanes:
                        place = next(left, None)
                        if place is None:
                            break
                        lanes.append(self._open(place, begun.get(place)))
                    if not lanes:
                        break
                    lane = lanes[0]
                    try:
                        records.append(next(lane.records))
                    except StopIteration:
                        ended[lane.place] = None
                        lanes.popleft()
                        continue
                    read_positions[lane.place] = lane.part
                    lanes.rotate(-1)
                states = {place: part.state_dict() for place, part in read_positions.items()}
                batch = self._made(records)
            if not records and not ended:
                return
            yield batch, After(self.epoch, len(records), {**states, **ended})

    def _open(self, place: int, state: Any) -> Lane:
        number, _, _ = self._order.records(self.epoch * self._order.size + place, 1 << 62)
        part = self._dataset.shard(self._order.size, number)
        if state is not None:
            if not _alike(part.state_dict(), state):
                raise ValueError(
                    "the position in shard %d is not one of this data set, but of one with other"
                    " stages (map, filter, ...): %r" % (number, state)
                )
            part.load_state_dict(state)
        return Lane(place, part, iter(part))


class StreamReading:
    """One pass over a rank's batches, in this process or a worker of its loader.

    A loader that keeps a state, as torchdata's, finds here that there is nothing to skip: the place
    is the stream's.
    """

    def __init__(self, batches: Iterator[Any], placed: bool) -> None:
        self._batches = batches
        self._placed = placed

    def __iter__(self) -> StreamReading:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def state_dict(self) -> Dict[str, str]:
        """Return where the place is."""
        return {"place": "stream.load(folder)"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing; raises ``ValueError`` if the stream has not loaded its positions."""
        if not self._placed:
            raise ValueError(
                "the loader's state does not say which samples are trained: call"
                " stream.load(folder) before the loop"
            )


def elastic_stream(
    dataset: Any,
    *,
    batch_size: int,
    seed: Optional[int] = None,
    lanes: int = 1,
    collate: Optional[Collate] = None,
    name: str = "train",
    rank: Optional[int] = None,
    world_size: Optional[int] = None,
) -> ElasticStream:
    """Stream the shards of ``dataset``, each sample once an epoch, in a world of any size.

    ``dataset`` has ``num_shards`` and ``shard(num_shards, index)``; what that returns is iterated
    over, and has ``state_dict()`` and ``load_state_dict()``, of values that JSON has, and yields
    the same records in each epoch. ``batch_size``: the most records that a rank takes at once.
    ``seed``: that of the order of the shards, another in each epoch; None: as they lie. ``lanes``:
    the number of shards that a batch takes records from in turn, for each worker of a loader.
    ``collate`` makes a batch from the list of its records, which may be empty. ``name`` tells the
    streams of one job apart. ``rank`` and ``world_size`` are those of torch's process group,
    or the launcher unless given.

    Raises ``TypeError`` if ``dataset`` is no such data set, and ``ValueError`` if it cannot go on
    exactly, or has fewer shards than the world has ranks.
    """
    wrong = not_streamable(dataset)
    if wrong:
        raise TypeError("elastic_stream(%s): %s" % (type(dataset).__name__, wrong))
    if index(batch_size) < 1 or index(lanes) < 1:
        raise ValueError(
            "elastic_stream: batch_size=%d and lanes=%d are from 1 on" % (batch_size, lanes)
        )
    wrong = inexact(dataset)
    if wrong:
        refuse(ValueError("elastic_stream: " + wrong))
    if rank is None or world_size is None:
        own, size = own_world("elastic_stream")
        rank = own if rank is None else rank
        world_size = size if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ValueError(
            "elastic_stream: there is no rank %d in a world of %d" % (rank, world_size)
        )
    if dataset.num_shards < world_size:
        refuse(
            ValueError(
                "elastic_stream: %d shards are too few for %d ranks, of which some would never"
                " train: cut the data into more shards, or let the world have fewer ranks"
                % (dataset.num_shards, world_size)
            )
        )
    kind = iterable_kind(ElasticStream)
    stream: ElasticStream = kind(
        dataset, batch_size, seed, lanes, collate, name, (rank, world_size)
    )
    return stream


def _restored(fields: Dict[str, Any]) -> Any:
    stream = object.__new__(iterable_kind(ElasticStream))
    stream.__dict__.update(fields)
    return stream


def _alike(fresh: Any, state: Any) -> bool:
    """Return whether two states have the same fields; one that may be None is not looked into."""
    if not isinstance(fresh, dict) or not isinstance(state, dict):
        return True
    return fresh.keys() == state.keys() and all(_alike(fresh[key], state[key]) for key in fresh)
