# SPDX-License-Identifier: Apache-2.0
"""The store's state of one data set that is handed out in shards, at one revision; immutable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace

from rdzv.dataclass import dataclass
from rdzv.intervals import Intervals, common, union, without
from rdzv.records.shards import OpenShards, PodShards, Saved, ShardWorld, Share, TrainedShards

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
