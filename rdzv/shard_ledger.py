# SPDX-License-Identifier: Apache-2.0
"""The store's state of one data set that is handed out in shards, at one revision; immutable.

A job's mirror shows its data sets as ledgers, and a ledger shows the progress of its ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Self
from urllib.parse import unquote

from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.keys import JobKeys
from rdzv.mirror import Mirror
from rdzv.records.shards import (
    Intervals,
    OpenShards,
    PodShards,
    Saved,
    ShardWorld,
    Share,
    TrainedShards,
    common,
    length,
    union,
    without,
)
from rdzv.store import KeyValue, WatchEvent

log = logging.getLogger(__name__)

SAVES_MAX = 256
"""Bound on the saves that a world may still begin from. Each keeps its places apart; beyond it, the
oldest are merged into the base, which a world may begin from, too."""

PIECES_MAX = 16_384
"""Bound on the pieces in all these saves: a save has about as many as there are ranks, and etcd
takes 1.5 MB, of which each piece takes some 24 bytes. Beyond it, the oldest saves are merged into
the base."""


@dataclass(frozen=True, slots=True)
class ShardLedger:
    """All records of one data set. ``world`` is None if it was never handed out."""

    world: ShardWorld | None = None
    open: OpenShards = field(default_factory=OpenShards)
    trained: TrainedShards = field(default_factory=TrainedShards)
    pods: Mapping[str, PodShards] = field(default_factory=dict)
    """The records of the pods, by member."""
    unreadable: str = ""
    """The reason why a record of it cannot be read, or empty; nothing is decided then."""

    def shares(self) -> Iterator[Share]:
        """Yield the shares of all ranks that count."""
        for pod in self.pods.values():
            if not pod.over:
                yield from pod.shares.values()

    def unsealed(self, share: Share) -> tuple[Saved, ...]:
        """Return those saves of a share that are not known to be every rank's."""
        return tuple(save for save in share.saves if save.step > self.trained.newest)

    def outstanding(self, epoch: Intervals) -> int:
        """Return how many of these places the world has not trained, as far as is known."""
        (low, high) = epoch[0]
        held = union(self.open.again, *(share.held for share in self.shares()))
        ahead = ((max(low, self.open.frontier), high),) if self.open.frontier < high else ()
        return sum(end - begin for begin, end in common(union(held, ahead), epoch))

    def with_pod(self, pod: PodShards) -> ShardLedger:
        """Return the ledger with another record of one pod."""
        return replace(self, pods={**self.pods, pod.member: pod})


def sealed(ledger: ShardLedger) -> ShardLedger:
    """Take in the saves that every rank of the world has reported: all that they contain is known.

    A rank that reports a step has reported before what it trained up to there, and a step that one
    rank has not reported is none to begin from.
    """
    world, trained = ledger.world, ledger.trained
    told = [ledger.unsealed(share) for share in ledger.shares()]
    if world is None or len(told) < world.ranks:
        return ledger
    steps = frozenset.intersection(*(frozenset(save.step for save in saves) for saves in told))
    before, kept = trained.newest, list(trained.saves)
    for step in sorted(steps):
        came = [save.places for saves in told for save in saves if before < save.step <= step]
        kept.append(Saved(step, union(*came)))
        before = step
    if before == trained.newest:
        return ledger
    return replace(ledger, trained=_bounded(replace(trained, saves=tuple(kept))))


def as_of(ledger: ShardLedger, start: int) -> TrainedShards | None:
    """Return what weights of step ``start`` contain; None if that is not known."""
    trained = sealed(ledger).trained
    if start == 0:
        return TrainedShards(mod_revision=trained.mod_revision)
    if start in (trained.base, *(save.step for save in trained.saves)):
        kept = tuple(save for save in trained.saves if save.step <= start)
        return replace(trained, saves=kept)
    out = any(share.held or share.used or ledger.unsealed(share) for share in ledger.shares())
    gone = any(pod.over for pod in ledger.pods.values())
    if start > trained.newest and not out and not gone:
        # Nothing was handed out since: the steps since then trained nothing of this data set.
        return _bounded(replace(trained, saves=(*trained.saves, Saved(start, ()))))
    return None


def opened(trained: TrainedShards, shard_size: int) -> OpenShards:
    """Return what is open to a world that begins with ``trained``, while no rank holds anything."""
    places = union(trained.places, *(save.places for save in trained.saves))
    end = places[-1][1] if places else 0
    frontier = -(-end // shard_size) * shard_size
    return OpenShards(frontier, without(((0, frontier),), places) if frontier else ())


def _bounded(trained: TrainedShards) -> TrainedShards:
    kept = pieces = 0
    for save in reversed(trained.saves):
        pieces += len(save.places)
        if kept == SAVES_MAX or (kept and pieces > PIECES_MAX):
            break
        kept += 1
    surplus = len(trained.saves) - kept
    if not surplus:
        return trained
    oldest = trained.saves[:surplus]
    return replace(
        trained,
        base=oldest[-1].step,
        places=union(trained.places, *(save.places for save in oldest)),
        saves=trained.saves[surplus:],
    )


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


def progress_warning(name: str, ledger: ShardLedger) -> str:
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


Record = ShardWorld | OpenShards | TrainedShards | PodShards


class ShardView:
    """The ledgers by the keys below ``shards/``; ``following`` keeps them in step with a mirror."""

    def __init__(self, keys: JobKeys, kvs: Iterable[KeyValue]) -> None:
        self._keys = keys
        self._records: dict[str, dict[str, Record]] = {}
        self._unreadable: dict[str, dict[str, str]] = {}
        self._ledgers: dict[str, ShardLedger] = {}
        self._apply([WatchEvent("put", kv) for kv in kvs])

    @classmethod
    def following(cls, keys: JobKeys, mirror: Mirror) -> Self:
        """Build the view of what the mirror has, and keep it up to date."""
        view = cls(keys, mirror.kvs.values())
        mirror.subscribe(view._apply)
        return view

    @property
    def names(self) -> tuple[str, ...]:
        """The data sets that the job has handed out."""
        return tuple(sorted(self._records))

    def ledger(self, name: str) -> ShardLedger:
        """Return what the store knows of one data set; the same object until that changes."""
        if name not in self._ledgers:
            records = self._records.get(name, {})
            faults = self._unreadable.get(name, {})
            world, opened = records.get("world"), records.get("open")
            trained = records.get("trained")
            self._ledgers[name] = ShardLedger(
                world=world if isinstance(world, ShardWorld) else None,
                open=opened if isinstance(opened, OpenShards) else OpenShards(),
                trained=trained if isinstance(trained, TrainedShards) else TrainedShards(),
                pods={one.member: one for one in records.values() if isinstance(one, PodShards)},
                unreadable=next(iter(faults.values()), ""),
            )
        return self._ledgers[name]

    def _apply(self, events: Sequence[WatchEvent]) -> None:
        for event in events:
            key = event.kv.key
            if not key.startswith(self._keys.shards):
                continue
            encoded, _, rest = key.removeprefix(self._keys.shards).partition("/")
            kind = _kind(rest)
            if kind is None:
                continue
            name = unquote(encoded)
            self._ledgers.pop(name, None)
            records = self._records.setdefault(name, {})
            faults = self._unreadable.setdefault(name, {})
            records.pop(rest, None)
            faults.pop(rest, None)
            if event.kind == "put":
                try:
                    records[rest] = kind.from_kv(event.kv)
                except RecordError as error:
                    log.warning("no shards of %s until this is mended: %s", name, error)
                    faults[rest] = str(error)


def _kind(rest: str) -> type[Record] | None:
    match rest.split("/"):
        case ["world"]:
            return ShardWorld
        case ["open"]:
            return OpenShards
        case ["trained"]:
            return TrainedShards
        case ["pods", _]:
            return PodShards
    return None
