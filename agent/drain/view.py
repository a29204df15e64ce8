# SPDX-License-Identifier: Apache-2.0
"""The snapshot that this sidecar's decisions about drains rest on, and the wait for its changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from agent.rundir.files import RunDir
from rdzv.drain.gate import RoundEnding, ending_in
from rdzv.drain.inputs import DrainingSnapshot, LiveRound, LiveRounds, places_of
from rdzv.drain.saves import of_round
from rdzv.job import JobClient
from rdzv.reconcile import Turn, first_of
from rdzv.shard_ledger import ShardLedger
from rdzv.snapshot import Listing, Places, Snapshot, listing_of


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
