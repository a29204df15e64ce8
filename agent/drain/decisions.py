# SPDX-License-Identifier: Apache-2.0
"""The decisions on drains: the snapshot they rest on, the wait for its changes, and their writes.

Carries out what ``rdzv.drain.decision`` decides. Any sidecar may write a decision, one does, and
the others see it in the store.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import time
from typing import Protocol

from agent.drain.own import OwnDrain
from agent.rundir.files import RunDir
from rdzv.drain import decision as draining
from rdzv.drain.decision import DrainDecision
from rdzv.drain.gate import RoundEnding, ending_in
from rdzv.drain.inputs import (
    DrainingSnapshot,
    DrainObservations,
    DrainPolicy,
    LiveRound,
    LiveRounds,
    observe,
    places_of,
)
from rdzv.drain.saves import of_round
from rdzv.drain.standing import phase_of
from rdzv.drain.transactions import transaction
from rdzv.job import JobClient
from rdzv.reconcile import DueWrite, Kernel, Outlook, Reconciler, Turn, first_of
from rdzv.records.drain import Drain, LastCommit
from rdzv.records.job import HistoryEntry
from rdzv.shard_ledger import ShardLedger
from rdzv.snapshot import Listing, Places, Snapshot, listing_of
from rdzv.store import GuardedWrites

TURN_S = 0.1
"""Time between two turns to write a decision, in seconds."""

COMMANDS_LOOK_S = 0.1
"""Poll interval of the commands of a pod that drains; the standard library has no file
notification."""

LOOK_S = 0.05
"""Shortest interval of looks without a change, in seconds."""

STANDS_S = 2.0
"""Log a blocking reason after it has persisted for this long."""

ENDS_AT_ONCE = 25
"""Drains that end in one transaction, each with its record, its vote and history: etcd takes 128
operations, and as many compares. The others follow in the next."""


class RoundSource(Protocol):
    """The source of live rounds: the rendezvous endpoint."""

    def live_rounds(self) -> LiveRounds:
        """Return the round that counts, and the one that this pod's ranks are in."""

    def ranks_at(self, round: LiveRound, step: int) -> bool:
        """Note that this pod's ranks are at ``step``; return whether it is to report the first."""

    async def live_rounds_changed(self, before: LiveRounds) -> LiveRounds:
        """Wait until the rounds differ from ``before``; return them."""

    async def caught_up(self) -> None:
        """Wait until the rounds are those of the generation that the member is registered in."""


class DrainView:
    """The present ``DrainingSnapshot`` of one pod, and the wait for the next.

    An epoch that was ``seen`` counts as used: ranks may have acknowledged in it even if a restored
    store has lost it, and those acknowledgements must not count for another attempt. The commit
    that ends the round of this pod's ranks is remembered, too, for a store that was restored to
    before it. ``ledgers`` returns those of all data sets in shards; their changes end no wait.
    """

    def __init__(
        self,
        client: JobClient,
        rounds: RoundSource,
        pod_uid: str,
        run_dir: RunDir,
        ledgers: Callable[[], Sequence[ShardLedger]] = tuple,
    ) -> None:
        self.seen = 0
        self._client = client
        self._ending: RoundEnding | None = None
        self._rounds = rounds
        self._pod_uid = pod_uid
        self._run_dir = run_dir
        self._ledgers = ledgers
        self._listed: tuple[Snapshot, Places, Listing] | None = None

    async def snapshot(self) -> DrainingSnapshot:
        """Build the snapshot of the store, the rounds and the run directory as they are now."""
        commands = await asyncio.to_thread(self._run_dir.commands)
        # Otherwise a member that has just registered would see no round, whatever has trained.
        await self._rounds.caught_up()
        membership, rounds = self._client.membership.snapshot(), self._rounds.live_rounds()
        if membership.commit is not None:
            self.seen = max(self.seen, membership.commit.epoch)
        # No torchrun has acted by what another pod's sidecar has seen.
        own = [] if rounds.own is None else [rounds.own]
        self._ending = ending_in(membership, own) or self._ending
        lost = self._ending.put_back_into(membership, own) if self._ending is not None else None
        return DrainingSnapshot(
            membership=membership,
            listing=self._listing_of(membership, places_of(rounds.counts)),
            round=rounds.counts,
            votes=self._client.membership.votes(),
            pod_uid=self._pod_uid,
            revision=self._client.mirror.certain_revision,
            commands=commands,
            used_epoch=self.seen,
            own_round=rounds.own,
            ledgers=self._ledgers(),
            lost=lost,
            saves=of_round(rounds.counts, membership, self._client.membership.saves()),
        )

    def _listing_of(self, membership: Snapshot, places: Places) -> Listing:
        if self._listed is None or self._listed[0] is not membership or self._listed[1] != places:
            self._listed = (membership, places, listing_of(membership, places))
        return self._listed[2]

    async def changed_from(self, before: DrainingSnapshot) -> None:
        """Wait until votes, members or rounds change."""
        await first_of(
            self._client.membership.votes_changed_from(before.votes),
            self._client.membership.changed_from(before.membership),
            self._rounds.live_rounds_changed(LiveRounds(before.round, before.own_round)),
        )


def turn_of(snapshot: DrainingSnapshot, me: str, turn_s: float) -> Turn:
    """Return the turn to write what is due: the members of the round that are there, in order."""
    round = snapshot.round
    there = [one for one in round.members if one not in round.left] if round else []
    return Turn(me, there, turn_s)


class Chronicle:
    """The times at which each drain was first seen in each phase, for the history.

    Monotonic, in seconds.
    """

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, float]] = {}

    def see(self, now: float, snapshot: Snapshot) -> None:
        """Record the phases in one snapshot; forget drains that are no longer stored."""
        for pod_uid in self._seen.keys() - snapshot.drains.keys():
            del self._seen[pod_uid]
        for pod_uid, drain in snapshot.drains.items():
            self._seen.setdefault(pod_uid, {}).setdefault(phase_of(snapshot, drain).name, now)

    def phases_s(self, now: float, pod_uid: str) -> Mapping[str, float]:
        """Return the seconds from a drain's first sight to each phase, and to ``now``, its end."""
        seen = self._seen.get(pod_uid, {})
        if not seen:
            return {}
        began = min(seen.values())
        phases = {
            f"{name}_after_s": round(at - began, 3) for name, at in seen.items() if at > began
        }
        return {**phases, "took_s": round(now - began, 3)}


class Coordinator(Reconciler):
    """The writer of due changes to commit and drains."""

    def __init__(
        self,
        kernel: Kernel,
        me: str,
        view: DrainView,
        own: OwnDrain,
        policy: DrainPolicy,
    ) -> None:
        super().__init__(kernel, "coordinator")
        self._me = me
        self._view = view
        self._own = own
        self._policy = policy
        self._observations = DrainObservations()
        self._chronicle = Chronicle()
        self._reason = ""
        self._reason_since_s = 0.0

    async def step(self) -> Outlook:
        """Decide what is due, and when something may be without a change."""
        snapshot = await self._view.snapshot()
        self._own.see_round(snapshot.own_round or snapshot.round)
        now = self.kernel.clock()
        due_in_s = self._own.due_in_s
        due_s = {} if due_in_s is None else {snapshot.pod_uid: now + due_in_s}
        self._observations = observe(now, self._observations, snapshot, due_s)
        self._chronicle.see(now, snapshot.membership)
        decision = draining.decide(now, snapshot, self._observations, self._policy)
        look_at_s = min(decision.wake_at_s, now + self._standing_s(now, snapshot, decision))
        if snapshot.commands and self._own.active:
            look_at_s = min(look_at_s, now + COMMANDS_LOOK_S)
        return Outlook(
            changed=partial(self._view.changed_from, snapshot),
            look_at_s=max(look_at_s, now + LOOK_S),
            write=self._write_of(now, snapshot, decision),
        )

    def _standing_s(self, now: float, snapshot: DrainingSnapshot, decision: DrainDecision) -> float:
        """Log the blocking reason once it has persisted; return the seconds until that is due.

        Returns infinity if nothing is to be logged any more. Nothing is logged if no drain is
        unfinished and no node waits to join.
        """
        drains = snapshot.membership.drains.values()
        joins = snapshot.round is not None and bool(snapshot.round.reforms)
        if decision.reason != self._reason:
            self._reason, self._reason_since_s = decision.reason, now
        if not joins and all(drain.outcome for drain in drains):
            return math.inf
        left_s = self._reason_since_s + STANDS_S - now
        if left_s > 0:
            return left_s
        self.diary.say(decision.reason)
        return math.inf

    def _write_of(
        self, now: float, snapshot: DrainingSnapshot, decision: DrainDecision
    ) -> DueWrite | None:
        if not (decision.commit or decision.last_commit or decision.drains):
            return None
        return DueWrite(
            partial(self._writes, now, snapshot, decision),
            # Every pod logs a commit when it shows the gate.
            decision.reason if decision.commit is None else "",
            turn=turn_of(snapshot, self._me, TURN_S),
        )

    def _writes(
        self, now: float, snapshot: DrainingSnapshot, decision: DrainDecision
    ) -> GuardedWrites:
        drains = _at_once(decision.drains)
        written = decision.last_commit and replace(decision.last_commit, at_unix_s=time())
        decision = replace(decision, last_commit=written, drains=drains)
        compares, operations = transaction(self.kernel.client.keys, snapshot, decision)
        commit, last = decision.commit, snapshot.membership.last_commit
        entries = [self._entry(now, drain, last) for drain in drains.values()]
        if commit is not None and commit.refused and commit.mute:
            details = {"run_id": commit.run, "round": commit.round, "mute": list(commit.mute)}
            entries.append(HistoryEntry("round", self._me, commit.reason, time(), details))
        return compares, [*operations, *self.kernel.client.history(*entries)]

    def _entry(self, now: float, drain: Drain, last: LastCommit | None) -> HistoryEntry:
        committed = drain.outcome == "committed" and last is not None and last.step == drain.step
        details: dict[str, object] = {
            "outcome": drain.outcome,
            "step": drain.step,
            "source": drain.source,
            "requested_by": drain.requested_by,
            "pod_uid": drain.pod_uid,
            **({"cause": drain.cause} if drain.cause else {}),
            **self._chronicle.phases_s(now, drain.pod_uid),
            "samples": last.samples if committed and last is not None else "",
        }
        return HistoryEntry("drain", drain.member, drain.reason, time(), details)


def _at_once(drains: Mapping[str, Drain]) -> dict[str, Drain]:
    """Return the drains to end in one transaction, by pod UID; the others follow.

    One for each member, as each writes the same key of the history: two pods may have had a name.
    """
    of_members: dict[str, str] = {}
    for uid, drain in drains.items():
        of_members.setdefault(drain.member, uid)
    return {uid: drains[uid] for uid in list(of_members.values())[:ENDS_AT_ONCE]}
