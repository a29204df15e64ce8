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
from typing import Any, NamedTuple, Self

from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.keys import last_name
from rdzv.records.codec import dump_record, load_record, take
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


@dataclass(frozen=True, slots=True)
class ShardWorld:
    """The world that shards are handed out to; a record is written once for each world.

    ``name`` is another one for each world; ``run`` and ``round`` say which of torchrun's it is, and
    are empty and 0 for one that named itself. ``ranks`` is how many there are. ``start`` is the
    step of its weights when it began. ``former`` names worlds before it, the newest last.
    """

    name: str
    plan: Plan
    ranks: int
    start: int
    run: str = ""
    round: int = 0
    former: tuple[str, ...] = ()
    mod_revision: int = 0

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return dump_record(
            {
                "name": self.name,
                **self.plan._asdict(),
                "ranks": self.ranks,
                "start": self.start,
                "run": self.run,
                "round": self.round,
                "former": self.former,
            }
        )

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        fields = load_record(kv.key, kv.value)
        seed = fields.get("seed")
        plan = Plan(
            take(kv.key, fields, "size", int),
            take(kv.key, fields, "shard_size", int),
            None if seed is None else take(kv.key, fields, "seed", int),
        )
        if plan.size < 1 or plan.shard_size < 1:
            raise RecordError(f"{kv.key}: a data set of {plan.size} in shards of {plan.shard_size}")
        former = take(kv.key, fields, "former", list, [])
        return cls(
            name=take(kv.key, fields, "name", str),
            plan=plan,
            ranks=take(kv.key, fields, "ranks", int),
            start=take(kv.key, fields, "start", int),
            run=take(kv.key, fields, "run", str, ""),
            round=take(kv.key, fields, "round", int, 0),
            former=tuple(str(name) for name in former),
            mod_revision=kv.mod_revision,
        )


@dataclass(frozen=True, slots=True)
class OpenShards:
    """The places that the world may still take: ``again``, and all from ``frontier`` on."""

    frontier: int = 0
    again: Intervals = ()
    mod_revision: int = 0

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return dump_record({"frontier": self.frontier, "again": self.again})

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        fields = load_record(kv.key, kv.value)
        return cls(
            take(kv.key, fields, "frontier", int),
            places_of(kv.key, fields.get("again")),
            kv.mod_revision,
        )


@dataclass(frozen=True, slots=True)
class TrainedShards:
    """The places in the weights: ``places`` in those of step ``base``, and what each save added.

    ``unknown``: the step up to which nothing was stored of what was trained, as in a store that has
    lost its data; that is handed out as if it had not been trained. 0: all is known.
    """

    base: int = 0
    places: Intervals = ()
    saves: tuple[Saved, ...] = ()
    unknown: int = 0
    mod_revision: int = 0

    @property
    def newest(self) -> int:
        """The newest step whose places are known."""
        return self.saves[-1].step if self.saves else self.base

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return dump_record(
            {
                "base": self.base,
                "places": self.places,
                "saves": self.saves,
                "unknown": self.unknown,
            }
        )

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        fields = load_record(kv.key, kv.value)
        return cls(
            take(kv.key, fields, "base", int),
            places_of(kv.key, fields.get("places")),
            saves_of(kv.key, fields.get("saves")),
            take(kv.key, fields, "unknown", int, 0),
            kv.mod_revision,
        )


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
    shares: Mapping[int, Share] = field(default_factory=dict)
    over: bool = False
    mod_revision: int = 0

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        shares = {str(rank): share for rank, share in self.shares.items()}
        return dump_record({"pod_uid": self.pod_uid, "shares": shares, "over": self.over})

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        fields = load_record(kv.key, kv.value)
        shares = take(kv.key, fields, "shares", dict)
        try:
            read = {int(rank): _share(kv.key, *share) for rank, share in shares.items()}
        except (ValueError, TypeError) as error:
            raise RecordError(f"{kv.key}: 'shares' is {shares!r}, which are none") from error
        return cls(
            member=last_name(kv.key),
            pod_uid=take(kv.key, fields, "pod_uid", str),
            shares=read,
            over=take(kv.key, fields, "over", bool, False),
            mod_revision=kv.mod_revision,
        )


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


def _share(key: str, held: Any, used: Any, saves: Any) -> Share:
    return Share(places_of(key, held), places_of(key, used), saves_of(key, saves))


def _is_pair(one: Any) -> bool:
    return isinstance(one, list) and len(one) == 2


def _is_piece(one: Any) -> bool:
    return _is_pair(one) and all(type(end) is int and end >= 0 for end in one)


def _grow(steps: Iterable[int]) -> bool:
    seen = list(steps)
    return all(one < other for one, other in itertools.pairwise(seen))
