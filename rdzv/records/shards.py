# SPDX-License-Identifier: Apache-2.0
"""The records of a data set that is handed out in shards.

Four kinds of keys: the world that trains, what is still to be handed out to it, what the saved
weights contain, and what each pod holds. Places are counted along one line: the epochs one after
the other, each of as many shards as the data set has, all of ``shard_size`` places. A set of 10⁶
consecutive places is one pair, so that the trained part of a data set is a few pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Annotated, Any, NamedTuple, Self

from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.keys import last_name
from rdzv.records.codec import decode_record, dump_record, encode, fields_of_record, take, taking
from rdzv.store import KeyValue

Intervals = tuple[tuple[int, int], ...]


def normal(pieces: Iterable[tuple[int, int]]) -> Intervals:
    """Merge ``pieces``, in any order and overlapping or not, into one set.

    A set of 10⁶ consecutive numbers is one pair, so that the trained part of a data set is a
    few pairs.
    """
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pieces):
        if low >= high:
            continue
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def union(*sets: Intervals) -> Intervals:
    """Return the numbers that are in at least one of ``sets``."""
    return normal(piece for one in sets for piece in one)


def without(one: Intervals, other: Intervals) -> Intervals:
    """Return the numbers that are in ``one`` and not in ``other``."""
    left: list[tuple[int, int]] = []
    at = 0
    for low, high in one:
        while at < len(other) and other[at][1] <= low:
            at += 1
        here = at
        while here < len(other) and other[here][0] < high:
            if other[here][0] > low:
                left.append((low, other[here][0]))
            low = other[here][1]
            here += 1
        if low < high:
            left.append((low, high))
    return tuple(left)


def common(one: Intervals, other: Intervals) -> Intervals:
    """Return the numbers that are in both."""
    return without(one, without(one, other))


def covers(one: Intervals, other: Intervals) -> bool:
    """Return whether all of ``other`` is in ``one``."""
    return not without(other, one)


def length(one: Intervals) -> int:
    """Return how many numbers are in the set."""
    return sum(high - low for low, high in one)


def lowest(one: Intervals, count: int) -> Intervals:
    """Return the ``count`` lowest numbers of the set, or all if it has fewer."""
    taken: list[tuple[int, int]] = []
    for low, high in one:
        if count <= 0:
            break
        taken.append((low, min(high, low + count)))
        count -= high - low
    return tuple(taken)


class Plan(NamedTuple):
    """The cut and the order of a data set. ``seed`` is None if shards come in their order."""

    size: int
    shard_size: int
    seed: int | None

    @property
    def epoch_length(self) -> int:
        """The places of one epoch; the last shard has some that no record is at."""
        return -(-self.size // self.shard_size) * self.shard_size

    def epoch_places(self, epoch: int) -> Intervals:
        """Return the places of one epoch."""
        return ((epoch * self.epoch_length, (epoch + 1) * self.epoch_length),)


class Saved(NamedTuple):
    """The places trained since the save before, up to and with ``step``."""

    step: int
    places: Intervals


def _take_plan(key: str, fields: Mapping[str, Any], _name: str) -> Plan:
    seed = None if fields.get("seed") is None else take(key, fields, "seed", int)
    plan = Plan(take(key, fields, "size", int), take(key, fields, "shard_size", int), seed)
    if plan.size < 1 or plan.shard_size < 1:
        raise RecordError(f"{key}: a data set of {plan.size} in shards of {plan.shard_size}")
    return plan


def _take_places(key: str, fields: Mapping[str, Any], name: str) -> Intervals:
    return places_of(key, fields.get(name))


def _take_saves(key: str, fields: Mapping[str, Any], name: str) -> tuple[Saved, ...]:
    return saves_of(key, fields.get(name))


Places = Annotated[Intervals, _take_places]


@dataclass(frozen=True, slots=True)
class ShardWorld:
    """The world that shards are handed out to; a record is written once for each world.

    ``name`` is another one for each world; ``run`` and ``round`` say which of torchrun's it is, and
    are empty and 0 for one that named itself. ``ranks`` is how many there are. ``start`` is the
    step of its weights when it began. ``former`` names worlds before it, the newest last.
    """

    name: str
    plan: Annotated[Plan, _take_plan]
    ranks: int
    start: int
    run: str = ""
    round: int = 0
    former: tuple[str, ...] = ()
    mod_revision: int = 0

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        rest = fields_of_record(self, without=("name", "plan"))
        return dump_record({"name": self.name, **self.plan._asdict(), **rest})

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        return decode_record(cls, kv)


@dataclass(frozen=True, slots=True)
class OpenShards:
    """The places that the world may still take: ``again``, and all from ``frontier`` on."""

    frontier: int = 0
    again: Places = ()
    mod_revision: int = 0

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return encode(self)

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        return decode_record(cls, kv, ("frontier", "again"))


@dataclass(frozen=True, slots=True)
class TrainedShards:
    """The places in the weights: ``places`` in those of step ``base``, and what each save added.

    ``unknown``: the step up to which nothing was stored of what was trained, as in a store that has
    lost its data; that is handed out as if it had not been trained. 0: all is known.
    """

    base: int = 0
    places: Places = ()
    saves: Annotated[tuple[Saved, ...], _take_saves] = ()
    unknown: int = 0
    mod_revision: int = 0

    @property
    def newest(self) -> int:
        """The newest step whose places are known."""
        return self.saves[-1].step if self.saves else self.base

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return encode(self)

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        return decode_record(cls, kv, ("base", "places", "saves"))


class Share(NamedTuple):
    """The places that one rank has been given and no common save is known to contain.

    ``held``: not trained as far as is known. ``used``: trained, in no save of this rank yet.
    ``saves``: those that it has reported.
    """

    held: Intervals = ()
    used: Intervals = ()
    saves: tuple[Saved, ...] = ()


@dataclass(frozen=True, slots=True)
class PodShards:
    """The shares of one pod's ranks, by local rank.

    ``over``: the pod was gone, and what it held went to others; nothing that it reports counts any
    more in this world.
    """

    member: str
    pod_uid: str
    shares: Annotated[Mapping[int, Share], _take_shares] = field(default_factory=dict)
    over: bool = False
    mod_revision: int = 0

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        shares = {str(rank): share for rank, share in self.shares.items()}
        return encode(self, without=("member",), shares=shares)

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        return decode_record(cls, kv, ("shares",), member=last_name(kv.key))


def places_of(where: str, pieces: Any) -> Intervals:
    """Parse places as JSON has them; raise ``RecordError`` if they are malformed."""
    if not isinstance(pieces, list) or not all(_is_piece(piece) for piece in pieces):
        raise RecordError(f"{where}: {pieces!r} are no places of a data set")
    return normal((low, high) for low, high in pieces)


def saves_of(where: str, saves: Any) -> tuple[Saved, ...]:
    """Parse saves as JSON has them; raise ``RecordError`` unless their steps grow."""
    if not isinstance(saves, list) or not all(_is_pair(save) for save in saves):
        raise RecordError(f"{where}: {saves!r} are no saves")
    read = tuple(Saved(step, places_of(where, places)) for step, places in saves)
    if not all(type(one.step) is int for one in read) or not _grow(one.step for one in read):
        raise RecordError(f"{where}: {saves!r} are no saves, whose steps grow")
    return read


def _share(held: Any, used: Any, saves: Any) -> Share:
    where = "a rank's share"
    return Share(places_of(where, held), places_of(where, used), saves_of(where, saves))


_take_shares = taking(
    dict,
    lambda shares: True,
    "",
    lambda shares: {int(rank): _share(*share) for rank, share in shares.items()},
)


def _is_pair(one: Any) -> bool:
    return isinstance(one, list) and len(one) == 2


def _is_piece(one: Any) -> bool:
    return _is_pair(one) and all(type(end) is int and end >= 0 for end in one)


def _grow(steps: Iterable[int]) -> bool:
    seen = list(steps)
    return all(one < other for one, other in itertools.pairwise(seen))
