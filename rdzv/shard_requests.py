# SPDX-License-Identifier: Apache-2.0
"""The decision on a rank's request for shards, and the transaction that writes its answer: pure.

A rank reports all that it holds, what it has trained and what its saves contain, and how much more
it wants. So a request can be repeated, and one whose answer was lost is answered in full by the
next. The transaction compares all that the answer rests on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rdzv.dataclass import dataclass
from rdzv.keys import JobKeys, ShardKeys
from rdzv.records.job import Member
from rdzv.records.shards import (
    Intervals,
    Plan,
    PodShards,
    Saved,
    ShardWorld,
    Share,
    common,
    covers,
    length,
    lowest,
    union,
    without,
)
from rdzv.shard_ledger import ShardLedger, as_of, opened, sealed
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, Delete, GuardedWrites, Operation, Put

FORMER_MAX = 16
"""Bound on the earlier worlds that are known by name: their ranks are told that these are over."""

RANK_SAVES_MAX = 64
"""Bound on the saves of one rank that wait for the other ranks'. Beyond it, the oldest two are
merged."""

SHARE_OF_REST = 2
"""Divisor: no rank is given more at once than an even share of what is open in the epoch, divided
by this, or than one shard: so that at its end no rank has much left while the others have
nothing."""


GONE_MAX = 32
"""Bound on the gone pods whose shards one answer takes back: etcd takes 128 compares."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a rank. Places are those of ``rdzv.records.shards``.

    ``world`` names its world; ``run`` and ``round`` are torchrun's, if it has one. ``left`` is what
    it holds and has not trained, ``used`` what it has trained since the last of ``saves``. ``want``
    is how many places it would like besides; 0 for a mere report. ``confirmed`` is the newest step
    whose save it was told to be stored, 0 for none: a store that does not have it was restored to
    an earlier revision.
    """

    member: str
    pod_uid: str
    world: str
    ranks: int
    local_rank: int
    plan: Plan
    start: int
    epoch: int = 0
    run: str = ""
    round: int = 0
    left: Intervals = ()
    used: Intervals = ()
    saves: tuple[Saved, ...] = ()
    want: int = 0
    confirmed: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a rank, and the ledger as it has to be then.

    ``given``: places to train. ``done``: the epoch is trained to its end. ``lost``: why nothing
    that this rank does counts any more. ``refused``: a mistake of its user, in one sentence.
    ``begins``: a world begins with this, and the request is to be decided once more.
    """

    ledger: ShardLedger
    reason: str
    given: Intervals = ()
    done: bool = False
    lost: str = ""
    refused: str = ""
    begins: bool = False


def decide(ledger: ShardLedger, present: Mapping[str, str], ask: Ask) -> Answer:
    """Decide one request. ``present``: the pod UIDs of the members that are there, by name."""
    if ledger.unreadable:
        return Answer(ledger, ledger.unreadable, refused=ledger.unreadable)
    if ledger.world is None or ledger.world.name != ask.world:
        why = _over(ledger.world, ask)
        if why:
            return Answer(ledger, why, lost=why)
        begun = _begin(ledger, ask)
        if isinstance(begun, str):
            return Answer(ledger, begun, refused=begun)
        return Answer(begun, f"the world {ask.world} begins", begins=True)
    why = _differs(ledger.world, ask)
    if why:
        return Answer(ledger, why, refused=why)
    now = _without_gone(ledger, present)
    taken = _report(now, ask)
    if isinstance(taken, str):
        return Answer(ledger, taken, lost=taken)
    now, again = taken
    now = _tidy(sealed(now), ask)
    given, why = again, f"{length(again)} places that it was given before"
    if ask.want and not again:
        now, given = _lease(now, ask)
        why = f"{length(given)} places of epoch {ask.epoch}"
    done = not given and not now.outstanding(ask.plan.epoch_places(ask.epoch))
    return Answer(now, "the epoch is trained" if done else why, given, done)


def _over(world: ShardWorld | None, ask: Ask) -> str:
    """Return why a rank that is not of the present world cannot begin one; empty if it can."""
    late = bool(ask.left or ask.used or ask.saves)
    if world is not None:
        late = late or ask.world in world.former
        late = late or (ask.run == world.run != "" and ask.round <= world.round)
    return f"the world {ask.world} of this rank is over" if late else ""


def _begin(ledger: ShardLedger, ask: Ask) -> ShardLedger | str:
    """Return the ledger of a world that begins at ``ask.start``, or why none can begin there.

    What was trained after that step opens again.
    """
    before = ledger.world
    former = () if before is None else (*before.former, before.name)[-FORMER_MAX:]
    world = ShardWorld(
        *(ask.world, ask.plan, ask.ranks, ask.start, ask.run, ask.round, former),
        mod_revision=before.mod_revision if before else 0,
    )
    if before is None:
        trained = replace(ledger.trained, base=ask.start, unknown=ask.start)
    else:
        known = as_of(ledger, ask.start)
        if known is None:
            steps = [save.step for save in sealed(ledger).trained.saves]
            newest = steps[-1] if steps else ledger.trained.base
            return (
                f"it is not known which records the weights of step {ask.start} contain, as not"
                f" all ranks have called committed({ask.start}): start from the checkpoint of step"
                f" {newest}, which muster.last_commit() names, or from step 0"
            )
        trained = known
        if before.plan != ask.plan and (trained.places or any(s.places for s in trained.saves)):
            return (
                f"the weights of step {ask.start} contain records of a data set of"
                f" {before.plan.size} in shards of {before.plan.shard_size} with seed"
                f" {before.plan.seed}: give muster.data.shards() the same, or another name"
            )
    fresh = opened(trained, ask.plan.shard_size)
    return ShardLedger(world, replace(fresh, mod_revision=ledger.open.mod_revision), trained)


def _differs(world: ShardWorld | None, ask: Ask) -> str:
    """Return how this rank differs from the others of its world; empty if it does not."""
    assert world is not None
    if world.start != ask.start:
        return (
            f"this rank starts from step {ask.start} and another one of its world from step"
            f" {world.start}: all ranks have to load the same checkpoint"
        )
    if world.ranks != ask.ranks:
        return (
            f"this rank is of a world of {ask.ranks} ranks, and another one of a world of"
            f" {world.ranks} with the same name: give each world another name"
        )
    if world.plan != ask.plan:
        return (
            f"this rank asks for shards of {ask.plan}, another one of its world for those of"
            f" {world.plan}: all ranks have to give muster.data.shards() the same"
        )
    return ""


def _without_gone(ledger: ShardLedger, present: Mapping[str, str]) -> ShardLedger:
    """Open what gone pods hold. From then on none of their reports counts.

    What they trained since the last common save opens, too: no save of this world can contain it
    with certainty any more, nor is any sealed without their reports.
    """
    gone = [
        pod
        for pod in ledger.pods.values()
        if not pod.over and present.get(pod.member) != pod.pod_uid
    ]
    for pod in gone[:GONE_MAX]:
        back = [
            union(share.held, share.used, *(save.places for save in ledger.unsealed(share)))
            for share in pod.shares.values()
        ]
        again = union(ledger.open.again, *back)
        ledger = replace(ledger, open=replace(ledger.open, again=again))
        ledger = ledger.with_pod(replace(pod, shares={}, over=True))
    return ledger


def _report(ledger: ShardLedger, ask: Ask) -> tuple[ShardLedger, Intervals] | str:
    """Take in a rank's report; return what it holds without knowing, or why it has lost all."""
    pod = ledger.pods.get(ask.member) or PodShards(ask.member, ask.pod_uid)
    share = pod.shares.get(ask.local_rank, Share())
    known = share.saves[-1].step if share.saves else 0
    news = tuple(save for save in ask.saves if save.step > known)
    # A save that is reported once more adds nothing.
    repeated = union(*(save.places for save in ask.saves if save.step <= known))
    saved = saved_places((*share.saves, *ask.saves))
    had = union(share.held, share.used)
    claims = union(ask.left, ask.used, saved_places(news))
    if pod.over or pod.pod_uid != ask.pod_uid:
        return "this pod was gone from the store, and what it held went to others"
    if _forgotten(ask, known):
        return "the store has gone back to before what this rank has saved"
    if not covers(had, claims) or not covers(_contained(ledger, share), repeated):
        return "this rank holds what the store does not know to be its own"
    again = without(share.held, union(ask.left, ask.used, saved))
    now = Share(union(ask.left, again), ask.used, _bounded((*share.saves, *news)))
    return ledger.with_pod(replace(pod, shares={**pod.shares, ask.local_rank: now})), again


def _forgotten(ask: Ask, known: int) -> bool:
    """Return whether the store has lost a save of this rank, as after a restore from a backup.

    The rank reports it no more, so its places would be taken for some whose answer never arrived.
    """
    return ask.confirmed > known


def saved_places(saves: tuple[Saved, ...]) -> Intervals:
    """Return all places that these saves contain."""
    return union(*(save.places for save in saves))


def _contained(ledger: ShardLedger, share: Share) -> Intervals:
    trained = ledger.trained
    return union(trained.places, saved_places(trained.saves), saved_places(share.saves))


def _tidy(ledger: ShardLedger, ask: Ask) -> ShardLedger:
    """Drop sealed saves from this pod's record; its newest one stays, to be known again."""
    pod = ledger.pods[ask.member]
    shares = {
        rank: share._replace(
            saves=ledger.unsealed(share) or tuple(Saved(s.step, ()) for s in share.saves[-1:])
        )
        for rank, share in pod.shares.items()
    }
    return ledger.with_pod(replace(pod, shares=shares))


def _bounded(saves: tuple[Saved, ...]) -> tuple[Saved, ...]:
    while len(saves) > RANK_SAVES_MAX:
        first, second = saves[:2]
        saves = (Saved(second.step, union(first.places, second.places)), *saves[2:])
    return saves


def _lease(ledger: ShardLedger, ask: Ask) -> tuple[ShardLedger, Intervals]:
    """Hand out open places: first those that came back, then whole shards from the frontier."""
    world, shards = ledger.world, ledger.open
    assert world is not None
    size = ask.plan.shard_size
    epoch = ask.plan.epoch_places(ask.epoch)
    (low, high) = epoch[0]
    if shards.frontier < low:
        # An epoch before it was broken off: the rest of it stays open.
        skipped = union(shards.again, ((shards.frontier, low),))
        shards = replace(shards, frontier=low, again=skipped)
    back = common(shards.again, epoch)
    rest = length(back) + max(0, high - shards.frontier)
    fair = -(-rest // (SHARE_OF_REST * max(1, world.ranks)))
    count = max(size, min(ask.want, fair))
    given = lowest(back, count)
    shards = replace(shards, again=without(shards.again, given))
    # The frontier moves in whole shards: half a shard is open only if it came back.
    more = (count - length(given)) // size * size
    more = min(more or (0 if given else size), high - shards.frontier)
    if more > 0:
        given = union(given, ((shards.frontier, shards.frontier + more),))
        shards = replace(shards, frontier=shards.frontier + more)
    if not given:
        return ledger, ()
    pod = ledger.pods[ask.member]
    share = pod.shares[ask.local_rank]
    held = share._replace(held=union(share.held, given))
    ledger = replace(ledger, open=shards)
    return ledger.with_pod(replace(pod, shares={**pod.shares, ask.local_rank: held})), given


def answer_transaction(
    keys: JobKeys,
    name: str,
    revision: int,
    membership: Snapshot,
    before: ShardLedger,
    after: ShardLedger,
) -> GuardedWrites:
    """Build the change of the store from ``before`` to ``after``; no operations if they are equal.

    ``revision`` is the one up to which ``before`` is complete. The transaction requires that the
    world is the one that it was, and that each record which it replaces is unchanged. Another world
    requires that all records are unchanged, and deletes those of pods. A pod that is given up as
    gone must be gone. The caller adds its registration guard, and for a world of torchrun the
    round.
    """
    here = keys.shards_of(name)
    operations: list[Operation] = []
    known = before.world.mod_revision if before.world else 0
    compares = [Compare(here.world, "mod", "=", known)]
    begins = before.world is None or after.world is None or after.world.name != before.world.name
    if begins and after.world is not None:
        # No pod has reported since. Deletions do not show here, but only another beginning deletes.
        compares.append(Compare(here.pods, "mod", "<", revision + 1, prefix=True))
        # One deletion for all: etcd takes 128 operations, and a world may have more pods.
        operations += [Put(here.world, after.world.to_json()), Delete(here.pods, prefix=True)]
    if begins or after.open != before.open:
        compares.append(Compare(here.open, "mod", "=", before.open.mod_revision))
        operations.append(Put(here.open, after.open.to_json()))
    if begins or after.trained != before.trained:
        compares.append(Compare(here.trained, "mod", "=", before.trained.mod_revision))
        operations.append(Put(here.trained, after.trained.to_json()))
    for member, pod in after.pods.items():
        was = before.pods.get(member)
        if pod != was:
            compares += _unchanged(keys, here, membership, was, pod)
            operations.append(Put(here.pod(member), pod.to_json()))
    return compares, operations


def _unchanged(
    keys: JobKeys, here: ShardKeys, membership: Snapshot, was: PodShards | None, pod: PodShards
) -> list[Compare]:
    compares = [Compare(here.pod(pod.member), "mod", "=", was.mod_revision if was else 0)]
    if pod.over:
        member: Member | None = membership.members.get(pod.member)
        generation = membership.job.generation if membership.job else 1
        there = keys.in_generation(generation).member(pod.member)
        compares.append(Compare(there, "mod", "=", member.mod_revision if member else 0))
    return compares
