# SPDX-License-Identifier: Apache-2.0
"""One run as the mirror shows it, parsed once per changed key, and its round as drains see it.

After a restore the store may have an older round than the one agents are in. The later of the
stored round and the last one seen counts, until that one is written back: a run's round never goes
back. A restored store may also have the round, but not the keys that its nodes had stored to meet
each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal

from launcher_shim.c10d.rounds.inputs import RoundMembers, RunSnapshot
from launcher_shim.c10d.rounds.observations import GONE, Standings
from launcher_shim.c10d.rounds.records import Node, Round, Seat, first_round
from launcher_shim.c10d.rounds.stages import round_of_exit_barrier, round_prefix
from launcher_shim.tcpstore.requests import round_met_by
from rdzv.drain.inputs import LiveRound, ReformCause
from rdzv.errors import RecordError
from rdzv.keys import RunKeys, last_name
from rdzv.records.drain import Commit, Phase
from rdzv.snapshot import Snapshot
from rdzv.store import WatchEvent

log = logging.getLogger(__name__)

Touched = Literal["round", "node", ""]


class MirroredRun:
    """The records of one run. ``revision`` is that of the newest batch."""

    def __init__(self, keys: RunKeys) -> None:
        self.keys = keys
        self.revision = 0
        self.stored_round = self.lost_round = first_round(keys.generation)
        self._nodes: dict[str, Node] = {}
        self._restored_at = 0
        self._finished: dict[int, set[str]] = {}
        """Nodes that have added to torch's exit barrier, by round. Outlives the node records."""
        self._unmet: dict[str, int] = {}
        """Deleted keys by which nodes meet, of the stored round or a later one; values are numbers
        of rounds."""
        self._round: Round | None = None

    @property
    def round(self) -> Round:
        """The stored round, or a later one that the store has lost; one object until it changes.

        No client deletes the keys by which the nodes of a live round meet: if one is gone, the
        store was restored to before it was stored, and the round is marked.
        """
        if self._round is None:
            self._round = self._later_round()
        return self._round

    def _later_round(self) -> Round:
        if self.lost_round.age <= self.stored_round.age:
            stored = self.stored_round
            return replace(stored, restored=True) if self._lacks_keys else stored
        return replace(
            self.lost_round,
            mod_revision=self.stored_round.mod_revision,
            restored=self.lost_round.complete,
            restored_at=self._restored_at if self.lost_round.complete else 0,
        )

    @property
    def lacks_round(self) -> bool:
        """Whether the store has lost the round or keys of it, so that it has to be written."""
        return self.lost_round.age > self.stored_round.age or self._lacks_keys

    @property
    def _lacks_keys(self) -> bool:
        stored = self.stored_round
        live = stored.complete and not stored.restored and not stored.finishing
        ends = stored.closed or stored.ends
        return live and not ends and stored.number in self._unmet.values()

    @property
    def node_count(self) -> int:
        """The number of nodes that have a record."""
        return len(self._nodes)

    def node(self, member: str) -> Node | None:
        """Return the record of one node; None if there is none, or just one from a backup."""
        node = self._nodes.get(member)
        return None if node is not None and self.round.is_later_than(node) else node

    def snapshot(self, revision: int, membership: RoundMembers) -> RunSnapshot:
        """Build a snapshot; the mirror is known to be complete up to ``revision``."""
        current, nodes = self.round, dict(self._nodes)
        left_out: tuple[Node, ...] = ()
        if current.restored_at:
            left_out = tuple(node for node in nodes.values() if current.is_later_than(node))
            for node in left_out:
                del nodes[node.member]
        return RunSnapshot(revision, current, nodes, membership, self._done(current), left_out)

    def went_back(self, revision: int, events: Sequence[WatchEvent]) -> bool:
        """Note a batch's revision; return whether the store was restored or emptied.

        A restored store that has reached the old revision again is detected by a record that is
        older than the one seen before.
        """
        restored = revision < self.revision or any(map(self._is_older, events))
        self.revision = revision
        if restored:
            self._keep(self.stored_round)
            self._restored_at = revision
            self._round = None
        return restored

    def apply(self, event: WatchEvent) -> Touched:
        """Apply one event; return which kind of record it changed."""
        key = event.kv.key
        if key.startswith(self.keys.nodes):
            self._apply_node(event)
            return "node"
        self._round = None
        if key == self.keys.round:
            self._apply_round(event)
            return "round"
        if key.startswith(self.keys.sums):
            self._apply_addend(event)
        elif key.startswith(self.keys.kv):
            return self._apply_value(event)
        return ""

    def _done(self, current: Round) -> frozenset[Seat]:
        finished = self._finished.get(current.number, ())
        return frozenset(s for s in current.frozen if f"{s.member}.{s.nonce}" in finished)

    def _apply_addend(self, event: WatchEvent) -> None:
        _, key, adder = self.keys.split(event.kv.key)
        number = round_of_exit_barrier(key)
        if number is None:
            return
        if event.kind == "put":
            self._finished.setdefault(number, set()).add(adder)
        elif (finished := self._finished.get(number)) is not None:
            finished.discard(adder)
            if not finished:
                del self._finished[number]

    def _apply_value(self, event: WatchEvent) -> Touched:
        lacked = self._lacks_keys
        if event.kind == "put":
            self._unmet.pop(event.kv.key, None)
        else:
            number = round_met_by(self.keys.split(event.kv.key)[1])
            if number is not None and number >= self.stored_round.number:
                self._unmet[event.kv.key] = number
        return "round" if self._lacks_keys != lacked else ""

    def _is_older(self, event: WatchEvent) -> bool:
        kv = event.kv
        newest: Node | Round | None = None
        if kv.key == self.keys.round:
            newest = self.stored_round
        elif kv.key.startswith(self.keys.nodes):
            newest = self._nodes.get(last_name(kv.key))
        return newest is not None and kv.mod_revision < newest.mod_revision

    def _apply_node(self, event: WatchEvent) -> None:
        try:
            node = Node.from_kv(event.kv) if event.kind == "put" else None
        except RecordError as error:
            log.warning("ignoring an unreadable node record: %s", error)
            node = None
        if node is not None:
            self._nodes[node.member] = node
        else:
            self._nodes.pop(last_name(event.kv.key), None)

    def _apply_round(self, event: WatchEvent) -> None:
        if event.kind == "delete":
            self._keep(self.stored_round)
            self.stored_round = first_round(self.keys.generation)
            return
        try:
            self.stored_round = stored = Round.from_kv(event.kv)
            self._unmet = {key: at for key, at in self._unmet.items() if at >= stored.number}
        except RecordError as error:
            log.warning("ignoring an unreadable round record: %s", error)
            self._keep(self.stored_round)
            self.stored_round = replace(
                first_round(self.keys.generation), mod_revision=event.kv.mod_revision
            )

    def remember(self, last_seen: Round) -> bool:
        """Keep a round that was seen before; return whether the store has lost it.

        Node records that the store has by now may be the backup's.
        """
        if last_seen.age <= self.round.age:
            return False
        self._keep(last_seen)
        self._restored_at = self.revision
        self._round = None
        return True

    def _keep(self, last_seen: Round) -> None:
        """Keep a round that the store may have lost."""
        if last_seen.age > self.lost_round.age:
            self.lost_round = last_seen


def live_round(
    run_id: str, snapshot: RunSnapshot, standings: Standings, reforms: ReformCause, master: str
) -> LiveRound:
    """Build the live round of ``snapshot``; an open one has no members.

    ``reforms``: as ``reform`` decides. ``master``: as ``master_token`` returns it.
    """
    current = snapshot.round
    return LiveRound(
        run=run_id,
        number=current.number,
        complete=current.complete,
        members=tuple(seat.member for seat in current.frozen),
        left=frozenset(seat.member for seat, where in standings.of.items() if where in GONE),
        reforms=reforms,
        finishing=current.finishing,
        closed=bool(current.closed),
        succeeded=current.closed == "success",
        master=master if current.complete else "",
        first=current.is_first,
        mod_revision=current.mod_revision,
        asking=frozenset(node.member for node in snapshot.asking())
        - snapshot.membership.quarantined,
        restored=current.restored,
        ends=current.ends,
        in_place=current.world > 0 and not current.is_ending and not current.finishing,
        let_go=frozenset(
            node.member
            for node in snapshot.nodes.values()
            if node.member in snapshot.membership.leaving
            and node.seat not in current.frozen
            and current.takes_in(replace(node, own=True))
        ),
    )


def master_token(run_id: str, number: int, value: Callable[[bytes], bytes | None]) -> str:
    """Return ``MASTER_ADDR:MASTER_PORT`` of a round, its name to its ranks; empty if unset.

    torch gives a worker neither its rendezvous nor its round, but every round has a worker store
    of its own. ``value`` looks up a launcher's key.
    """
    prefix = round_prefix(run_id, number)
    address, port = value(prefix + b"MASTER_ADDR"), value(prefix + b"MASTER_PORT")
    if not address or not port:
        return ""
    return f"{address.decode(errors='replace')}:{port.decode(errors='replace')}"


def precedence(run: str, one: Round | LiveRound) -> tuple[bool, bool, int, str]:
    """Return a sort key for rounds of several runs: the one that counts is the greatest."""
    return (not one.closed, one.complete, one.mod_revision, run)


def counting_round(rounds: Iterable[LiveRound], membership: Snapshot) -> LiveRound | None:
    """Choose the round that counts if there are several runs: they share one commit record.

    A round that stands still after its save counts until it has ended or trains on. If a world of
    another run reset its commit, no sidecar would know that it stands still, and its ranks would
    train on beyond the step that was saved. Otherwise, the round that counts is one that a member
    leaves, whose work would be lost, or else one that is to form again; among several, the one
    whose ranks are held already, or else the newest. A save that has begun ends first: if it were
    broken off, ranks that have not read of its step would train past it, while the others wait for
    them in the save. The choice depends on records, and on each sidecar's gather window: all choose
    the same round in the end. Beside a sidecar whose version knows only the newest round, that one
    counts: otherwise the two would take the commit from each other without end.
    """
    rounds = tuple(rounds)
    live = [one for one in rounds if one.live]
    phase, committing = _commit_of(live, membership.commit)
    if phase == "done":
        return committing
    if any(member.counts_newest_run for member in membership.members.values()):
        return newest_round(rounds)
    if phase == "commit":
        return committing
    drains = membership.drains.values()
    leaving = {one.member for one in drains if not one.outcome and membership.has_name(one)}
    can_save = [one for one in live if not one.finishing]
    wanted = [one for one in can_save if not leaving.isdisjoint(one.members)]
    wanted = wanted or [one for one in can_save if one.reforms]
    if phase == "hold" and committing in wanted:
        return committing
    return newest_round(wanted or rounds)


def _commit_of(live: Iterable[LiveRound], commit: Commit | None) -> tuple[Phase, LiveRound | None]:
    """Find the live round that the commit record is about, and the record's phase."""
    if commit is not None:
        for one in live:
            if commit.is_of(one.run, one.number):
                return commit.phase, one
    return "idle", None


def own(rounds: Iterable[LiveRound], member: str) -> LiveRound | None:
    """Choose the live round that ``member`` is in; None if there is none."""
    return newest_round(
        one for one in rounds if one.live and member in one.members and member not in one.left
    )


def newest_round(rounds: Iterable[LiveRound]) -> LiveRound | None:
    """Choose the newest round that trains; if none does, the newest."""
    return max(rounds, key=lambda one: precedence(one.run, one), default=None)
