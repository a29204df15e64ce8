# SPDX-License-Identifier: Apache-2.0
"""The inputs of the drain state machine: the membership, the round, the votes, and time.

A sidecar measures time from its own first sight of an event: that is never earlier than the event,
so that no deadline is taken to be over too soon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Literal, NamedTuple

from rdzv.dataclass import dataclass
from rdzv.keys import JobKeys
from rdzv.records.drain import Commit, Drain, LastCommit, Phase, Vote
from rdzv.records.progress import PodSaves
from rdzv.shard_ledger import ShardLedger, as_of
from rdzv.snapshot import NO_ROUND, Listing, Places, Snapshot
from rdzv.store import Compare

ReformCause = Literal["", "join", "shrink", "pause", "hang"]
"""The reason to form a world again that has lost no node. ``join``: it lets newcomers in.
``shrink``: it is larger than the job's sizes allow. ``pause``: the job is paused. ``hang``: a
torchrun is silent, and its ranks train."""


@dataclass(frozen=True, slots=True)
class LiveRound:
    """One round of a launcher's run, as the store has it.

    ``members`` is the frozen list in rank order, empty while the round is open; ``left`` those of
    it that are gone. ``reforms``: why the world is to form again although no node leaves.
    ``succeeded``: it is closed, and all ranks have ended well. ``master`` is
    ``MASTER_ADDR:MASTER_PORT``, which names the round to its ranks; empty while unknown. ``first``:
    the run begins with it, in this generation. ``mod_revision`` is that of the round key.
    ``asking``: the members that ask for a place. ``restored``: the store was restored to a revision
    before it, or has lost keys of it. ``ends``: why the store says that it must form again; empty
    if it does not, or not yet. ``in_place``: its world changes in place, without a save.
    ``let_go``: members that leave, and that such a world goes on without.
    """

    run: str
    number: int
    complete: bool
    members: tuple[str, ...] = ()
    left: frozenset[str] = frozenset()
    reforms: ReformCause = ""
    finishing: bool = False
    closed: bool = False
    succeeded: bool = False
    master: str = ""
    first: bool = False
    mod_revision: int = 0
    asking: frozenset[str] = frozenset()
    restored: bool = False
    ends: str = field(default="", compare=False)
    in_place: bool = False
    let_go: frozenset[str] = frozenset()

    @property
    def live(self) -> bool:
        """Whether a world trains in it."""
        return self.complete and not self.closed

    def ends_well(self, member: str) -> bool:
        """Return whether ``member`` is in it, and it is finishing or has succeeded."""
        if not self.live:
            return self.succeeded and member in self.members
        return self.finishing and member in self.members and member not in self.left


class LiveRounds(NamedTuple):
    """The rounds that drains depend on; a job may have several runs."""

    counts: LiveRound | None = None
    """The round that the commit is about, the same for every sidecar; None before the first."""
    own: LiveRound | None = None
    """The round that this pod's ranks are in; None if they are in none."""


def places_of(round: LiveRound | None) -> Places:
    """Return the members that have a place in ``round``, and those that ask for one."""
    if round is None or round.closed:
        return NO_ROUND
    return Places(frozenset(round.members) - round.left, round.asking)


@dataclass(frozen=True, slots=True)
class DrainingSnapshot:
    """All inputs of a decision about drains and joins, and of a gate; immutable."""

    membership: Snapshot
    listing: Listing
    round: LiveRound | None
    """The round that counts; None if no launcher has a rendezvous."""
    votes: Mapping[str, Vote]
    """The votes of the present epoch, by member."""
    pod_uid: str
    """The pod of the sidecar that decides."""
    revision: int = field(kw_only=True)
    """The store's revision up to which this is complete; may be later than the last change in
    ``membership``."""
    commands: int | None = None
    """The number of commands of a central launcher that run in this pod; None if no such launcher
    uses it."""
    used_epoch: int = 0
    """The newest epoch that this sidecar has seen or voted in. A store that was emptied or restored
    would count from an earlier one again, and old progress would count for the wrong attempt."""
    own_round: LiveRound | None = None
    """The round that this pod's ranks are in; None if they are in none."""
    ledgers: Sequence[ShardLedger] = ()
    """The ledgers of the data sets that are handed out in shards."""
    lost: tuple[Commit, LastCommit | None] | None = None
    """The commit that ends a live round, and the last commit with it, which the store has lost
    (``rdzv.drain.gate``)."""
    saves: Sequence[PodSaves] = ()
    """The saves that members of the round have reported of it, in rank order."""

    @property
    def commit_in_force(self) -> Commit | None:
        """The commit that gates go by: the record, or what the store has lost of it."""
        return self.lost[0] if self.lost else self.membership.commit

    @property
    def commit(self) -> Commit:
        """The commit record; an idle one if there is none."""
        return self.membership.commit or Commit(mod_revision=self.membership.unreadable_commit)

    @property
    def saved_by_others(self) -> int:
        """The newest step that all have saved but those that did not vote; -1 for none.

        If none voted, it is that of all: their ranks save, though their sidecars cannot vote.
        """
        saved = {one.member: frozenset(one.steps) for one in self.saves}
        members = () if self.round is None else self.round.members
        voted = [name for name in members if name not in self.commit.mute] or members
        steps = [saved.get(name, frozenset()) for name in voted]
        return max(frozenset.intersection(*steps), default=-1) if steps else -1

    def is_known(self, step: int, round: LiveRound) -> bool:
        """Return whether a world could begin from ``step``, which all ranks of ``round`` saved.

        A rank reports a save once the store has which shards its weights contain. A store that was
        restored to before that does not know them, and may not know that the world trains a data
        set, or have no record of it at all: the next world would be refused shards from such a step
        again and again, or be handed again what is in the weights.
        """
        here = (round.run, round.number)
        return all(
            ledger.world is not None and as_of(ledger, step) is not None
            for ledger in self.ledgers
            if round.restored
            or (ledger.world is not None and (ledger.world.run, ledger.world.round) == here)
        )

    def member_of(self, drain: Drain) -> str | None:
        """Return the member of the live round that ``drain`` is for; None if it is in no round."""
        if self.round is None or not self.round.live or drain.member not in self.round.members:
            return None
        return drain.member if self.membership.has_name(drain) else None


@dataclass(frozen=True, slots=True)
class DrainPolicy:
    """The timeouts of a drain, in seconds, and what may happen below ``min``."""

    below_min: Literal["hold", "commit"] = "hold"
    """The policy for a leave below ``min``. ``hold`` keeps a leaver until enough others are listed,
    or until its deadline; ``commit`` releases it once all have saved."""
    hold_s: float = 10.0
    """Timeout of a vote. While one rank is held, others may wait for it in a collective."""
    pause_s: float = 5.0
    """Backoff before another hold after one that failed; it doubles with each failure."""
    pause_max_s: float = 240.0
    """The longest backoff."""
    tries: int = 3
    """The number of votes missed in a row after which a join waits only for a periodic save of all
    others, or for a later attempt. Each attempt stops all ranks for ``hold_s``."""
    tries_max: int = 8
    """The number of votes missed in a row after which it waits no longer: with the backoff, less
    than ten minutes after the first ``tries``. More: newcomers idle beside a script that never
    saves. Fewer: more steps are made again."""
    done_s: float = 30.0
    """Time for which the world waits after a save for a leave or a join to be granted."""
    save_s: float = 600.0
    """Timeout of a save that no deadline ends: one for a join alone, or, from the deadline on, that
    of the others if the leaver has saved."""
    promise_s: float = 3.0
    """Time that a rank may take to promise a save before a central launcher goes. A longer one
    delays a launcher whose script never promises any."""
    launch_s: float = 5.0
    """Time after a pod was delisted for which a central launcher may still start a command in
    it."""


@dataclass(frozen=True, slots=True)
class DrainObservations:
    """One sidecar's observations of drains. Times are of its monotonic clock, in seconds."""

    epoch: int = -1
    phase: Phase = "idle"
    since_s: float = 0.0
    """The time since which it has seen the present epoch and phase."""
    epoch_since_s: float = 0.0
    """The time since which it has seen the present epoch."""
    due_s: Mapping[str, float] = field(default_factory=dict)
    """By pod UID: the latest time at which SIGTERM reaches the pod, its deadline less its
    reserve."""
    reported_s: Mapping[str, float] = field(default_factory=dict)
    """By pod UID: the seconds left in the drain record, from which ``due_s`` was computed."""
    saved_before: int = -1
    """``DrainingSnapshot.saved_by_others`` at the first sight of the present phase."""
    own_since_s: float = math.inf
    """The time since which it has seen its own pod drain; infinite if it does not."""
    own_ran: bool = False
    """Whether commands have run in its pod since then."""


def observe(
    now: float,
    previous: DrainObservations,
    snapshot: DrainingSnapshot,
    known_due_s: Mapping[str, float],
) -> DrainObservations:
    """Return the observations with one snapshot added.

    ``known_due_s``: deadlines, less reserve, that this sidecar knows from its run directory: its
    own pod's, also across a restart.
    """
    commit = snapshot.commit
    same_epoch = commit.epoch == previous.epoch
    same_phase = same_epoch and commit.phase == previous.phase
    reported_s = {
        uid: drain.seconds_left
        for uid, drain in snapshot.membership.drains.items()
        if drain.seconds_left is not None
    }
    due_s: dict[str, float] = {}
    for uid, left_s in reported_s.items():
        if previous.reported_s.get(uid) == left_s:
            due_s[uid] = previous.due_s[uid]
        else:
            due_s[uid] = now + left_s - snapshot.membership.drains[uid].reserve_s
        due_s[uid] = known_due_s.get(uid, due_s[uid])
    drains = snapshot.pod_uid in snapshot.membership.drains
    return DrainObservations(
        epoch=commit.epoch,
        phase=commit.phase,
        since_s=previous.since_s if same_phase else now,
        epoch_since_s=previous.epoch_since_s if same_epoch else now,
        due_s=due_s,
        reported_s=reported_s,
        saved_before=previous.saved_before if same_phase else snapshot.saved_by_others,
        own_since_s=min(previous.own_since_s, now) if drains else math.inf,
        own_ran=drains and (previous.own_ran or bool(snapshot.commands)),
    )


def unchanged(keys: JobKeys, snapshot: DrainingSnapshot) -> list[Compare]:
    """Return the compares which hold while the job, the commit and the round are as they were."""
    job, round = snapshot.membership.job, snapshot.round
    assert job is not None
    here = keys.in_generation(job.generation)
    compares = [
        Compare(keys.job, "mod", "=", job.mod_revision),
        Compare(here.commit, "mod", "=", snapshot.commit.mod_revision),
    ]
    if round is not None:
        compares.append(Compare(here.run(round.run).round, "mod", "=", round.mod_revision))
    return compares
