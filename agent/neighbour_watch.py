# SPDX-License-Identifier: Apache-2.0
"""The watch over this sidecar's neighbours: it suspects, takes back and evicts in the store.

``rdzv.peers`` decides. Every write compares all that the decision rested on, so that nothing is
evicted whose suspicion was taken back meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import time

from agent.neighbour import Dial, Neighbour, PeerAway, PeerMute
from launcher_shim.c10d.rounds.records import LOST, Node, Round
from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.job import JobClient, Registered
from rdzv.keys import GenerationKeys
from rdzv.members.registrar import Registrar
from rdzv.peers import (
    Eviction,
    Sign,
    Suspicion,
    Unreached,
    decide_evictions,
    in_force,
    near,
    watched_by,
)
from rdzv.reconcile import DueWrite, Kernel, Outlook, Reconciler
from rdzv.records.job import HistoryEntry, Member
from rdzv.records.world import WorldChange
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, Delete, GuardedWrites, KeyValue, Operation, Put, WatchEvent

log = logging.getLogger(__name__)

KEYS_MAX = 40
"""Bound on the keys of a lost member that one transaction takes: etcd takes 128 operations."""

RING_REST_S = 1.0
"""Minimum interval between two looks at who the neighbours are: a burst of joins costs few."""

UNREACHED_S = 30.0
"""Time after which a neighbour that was never reached is reported, in seconds."""


def suspicion(
    here: GenerationKeys,
    guard: Registered,
    member: Member,
    by: str,
    sign: Sign,
    stored: Mapping[str, Suspicion],
) -> GuardedWrites:
    """Build the write of a suspicion of this very incarnation of ``member``."""
    key = here.suspicion(member.name, by)
    before = stored[key].mod_revision if key in stored else 0
    one = Suspicion(by, member.name, member.incarnation, sign)
    compares = [
        Compare(here.member(member.name), "mod", "=", member.mod_revision),
        Compare(key, "mod", "=", before),
    ]
    return compares, [Put(key, one.to_json(), guard.lease() or 0)]


def backing_out(untrue: Sequence[Suspicion]) -> GuardedWrites:
    """Build the write that takes suspicions back, as they are stored."""
    compares = [Compare(one.key, "mod", "=", one.mod_revision) for one in untrue]
    return compares, [Delete(one.key) for one in untrue]


def eviction(client: JobClient, generation: int, one: Eviction, at_unix_s: float) -> GuardedWrites:
    """Build the eviction: what the end of the lease would do, and that its nodes have left.

    It compares the incarnation, each vote and its member's registration, and that no one was
    suspected since.
    """
    here, mirror, member = client.keys.in_generation(generation), client.mirror, one.member
    key = here.member(member.name)
    compares = [
        Compare(key, "mod", "=", member.mod_revision),
        Compare(here.suspicions, "mod", "<", mirror.certain_revision + 1, prefix=True),
    ]
    for vote in one.votes:
        compares.append(Compare(vote.key, "mod", "=", vote.mod_revision))
        compares.append(Compare(here.member(vote.by), "lease", "=", vote.lease))
    details = {"incarnation": member.incarnation, "pod_uid": member.pod_uid, "early": True}
    entry = HistoryEntry("lost", member.name, one.reason, at_unix_s, details)
    operations: list[Operation] = [Delete(here.suspicions_of(member.name), prefix=True)]
    owned = [kv for kv in mirror.kvs.values() if kv.lease == member.lease]
    for kv in sorted(owned, key=lambda kv: kv.key != key)[:KEYS_MAX]:
        node = _node(here, member.name, kv)
        if node is None:
            operations.append(Delete(kv.key))
        elif node.state != "left":
            compares.append(Compare(kv.key, "mod", "=", kv.mod_revision))
            left = replace(node, state="left", left_reason="closed", round=0, finished=False)
            operations.append(Put(kv.key, left.to_json(), kv.lease))
    return compares, [*operations, *client.history(entry)]


def _node(here: GenerationKeys, member: str, kv: KeyValue) -> Node | None:
    """Return the record of a node of ``member``; None for any other key."""
    if not kv.key.startswith(here.runs) or kv.key != here.run(here.run_id_of(kv.key)).node(member):
        return None
    try:
        return Node.from_kv(kv)
    except RecordError:
        return None


@dataclass(frozen=True, slots=True)
class WorldsSeen:
    """The present worlds: members that may be evicted early at a refused connection, and those that
    may not be at all, as their world ends well; ``of``: the members of each one's world."""

    failed: frozenset[str]
    finishing: frozenset[str]
    of: dict[str, frozenset[str]]
    unchanged: tuple[Compare, ...]


def has_failed(current: Round, change: WorldChange | None) -> bool:
    """Return whether the world of a round has lost nodes, so that no rank of it trains on.

    A form that failed is no such sign: a sidecar that starts again breaks it, too.
    """
    if change is not None and (change.phase, change.round) == ("broken", current.number):
        return change.attempts == 0
    return current.ends.startswith(LOST)


class PeerWatch(Reconciler):
    """The neighbours of one member, and what this sidecar writes of them."""

    def __init__(self, kernel: Kernel, registrar: Registrar, dial: Dial) -> None:
        super().__init__(kernel, "peers")
        self._client = kernel.client
        self._registrar = registrar
        self._dial = dial
        self._me = registrar.identity.member
        self._neighbours: dict[str, tuple[Neighbour, asyncio.Task[None]]] = {}
        self._suspicions: dict[str, Suspicion] = {}
        self._since_s: dict[tuple[str, int], float] = {}
        self._looked: dict[str, int] = {}
        self._alive: set[tuple[str, int]] = set()
        self._ring_of: Snapshot | None = None
        self._ring_at_s = -math.inf
        self._unreached: tuple[str, int | None, tuple[str, ...]] = ("", None, ())
        self._tasks: asyncio.TaskGroup

    async def run(self) -> None:
        """Watch until cancelled."""
        mirror = self._client.mirror
        await mirror.changed_after(0)
        unsubscribe = mirror.subscribe(self._see)
        self._see([WatchEvent("put", kv) for kv in mirror.kvs.values()])
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await super().run()
        finally:
            unsubscribe()

    async def step(self) -> Outlook:
        """Follow the ring, and decide what to write of the neighbours: one thing at a time."""
        look_at_s = self._follow_ring()
        generation = self._registrar.generation
        if generation is None:
            self._since_s.clear()
            return Outlook(self.kernel.registered, look_at_s)
        write, act_at_s = self._due(generation)
        report_at_s = math.inf
        if write is None:
            write, report_at_s = self._report_unreached(generation)
        return Outlook(look_at_s=min(look_at_s, act_at_s, report_at_s), write=write)

    def by_state(self) -> dict[str, float]:
        """Count the neighbours that are reached, lost, or were never reached."""
        found = {"reached": 0.0, "lost": 0.0, "unreached": 0.0}
        for one, _ in self._neighbours.values():
            found["lost" if one.sign else "reached" if one.reached else "unreached"] += 1
        return found

    # -- what it sees

    def _see(self, events: Sequence[WatchEvent]) -> None:
        for event in events:
            key = event.kv.key
            if "/suspicions/" in key:
                self._suspicions.pop(key, None)
                if event.kind == "put":
                    with suppress(RecordError):
                        self._suspicions[key] = Suspicion.from_kv(event.kv)
                self.wake()
            elif "/members/" in key or (self._suspicions and key.endswith(("/round", "/world"))):
                self.wake()

    def _follow_ring(self) -> float:
        """Open lines to new neighbours, and close those to former ones; return when to look again.

        A member that has registered again is another neighbour: what was seen before is over.
        """
        snapshot, now = self._client.membership.snapshot(), self.clock()
        if snapshot is self._ring_of:
            return math.inf
        if now < self._ring_at_s + RING_REST_S:
            return self._ring_at_s + RING_REST_S
        self._ring_of, self._ring_at_s = snapshot, now
        wanted = {one.name: one for one in watched_by(self._me, snapshot.members)}
        for name, (neighbour, task) in tuple(self._neighbours.items()):
            held, there = neighbour.member, wanted.get(name)
            if there is None or there.incarnation != held.incarnation:
                task.cancel()
                del self._neighbours[name]
        for name, member in wanted.items():
            if name not in self._neighbours:
                made = Neighbour(member, self._dial, self.clock, self.wake)
                task = self._tasks.create_task(made.run(), name=f"line to {name}")
                self._neighbours[name] = made, task
        return math.inf

    def _worlds(self, generation: int) -> WorldsSeen:
        here = self._client.keys.in_generation(generation)
        failed: set[str] = set()
        finishing: set[str] = set()
        of: dict[str, frozenset[str]] = {}
        compares = []
        kvs = self._client.mirror.kvs
        for kv in self._client.mirror.under(here.runs):
            run_id = here.run_of_round(kv.key)
            if run_id is None:
                continue
            stored, change = kvs.get(here.run(run_id).world), None
            compares.append(Compare(kv.key, "mod", "=", kv.mod_revision))
            if stored is not None:
                compares.append(Compare(stored.key, "mod", "=", stored.mod_revision))
                with suppress(RecordError):  # the round counts, whatever stands beside it
                    change = WorldChange.from_kv(stored)
            with suppress(RecordError):
                one = Round.from_kv(kv)
                names = {seat.member for seat in one.frozen} if one.complete else set()
                of |= dict.fromkeys(names, frozenset(names))
                if has_failed(one, change):
                    failed |= names
                if one.finishing:
                    finishing |= names
        return WorldsSeen(frozenset(failed), frozenset(finishing), of, tuple(compares))

    # -- what it does

    def _due(self, generation: int) -> tuple[DueWrite | None, float]:
        """Return what is due, and when something may be due by time."""
        if not (self._suspicions or self._signs()):
            self._since_s.clear()
            return None, math.inf
        now, snapshot = self.clock(), self._client.membership.snapshot()
        present = in_force(snapshot, self._suspicions.values())
        mine = {(one.member, one.incarnation) for one in present}
        self._since_s = {one: self._since_s.get(one, now) for one in mine}
        self._try_suspected(snapshot, present)
        if (due := self._due_suspicion(generation, snapshot, present)) is not None:
            return due, math.inf
        worlds = self._worlds(generation)
        open_to_it = [one for one in present if one.member not in worlds.finishing]
        decision = decide_evictions(
            now, snapshot, open_to_it, self._since_s, worlds.failed, worlds.of
        )
        for one in decision.evictions:
            if any(vote.by == self._me for vote in one.votes):
                return DueWrite(partial(self._eviction, generation, one, worlds)), math.inf
        return None, decision.wake_at_s

    def _report_unreached(self, generation: int) -> tuple[DueWrite | None, float]:
        """Return the report of neighbours that were never reached, and when one more may be."""
        now = self.clock()
        never = [one for one, _ in self._neighbours.values() if not one.reached]
        due = [one for one in never if now >= one.since_s + UNREACHED_S]
        wake_at_s = min(
            (one.since_s + UNREACHED_S for one in never if one not in due), default=math.inf
        )
        names = tuple(sorted(one.member.name for one in due))
        guard = self._registrar.guard(generation)
        report = (guard.member_key, guard.lease(), names)
        if report == self._unreached or not (names or self._unreached[2]):
            self._unreached = report
            return None, wake_at_s
        key = self._client.keys.in_generation(generation).unreached_by(self._me)
        put = Put(key, Unreached(names).to_json(), guard.lease() or 0)
        sentence = (
            f"cannot reach the health port of {', '.join(names)}: that its machine is lost is"
            " seen when its lease ends; let the pods of the job reach each other's ports"
            if names
            else "reaches the health ports of all its neighbours"
        )
        write = DueWrite(
            lambda: ([], [put if names else Delete(key)]),
            sentence,
            {"event": "peers"},
            written=partial(setattr, self, "_unreached", report),
        )
        return write, wake_at_s

    def _signs(self) -> list[Neighbour]:
        return [one for one, _ in self._neighbours.values() if one.sign is not None]

    def _due_suspicion(
        self, generation: int, snapshot: Snapshot, present: Sequence[Suspicion]
    ) -> DueWrite | None:
        """Return what is to be taken back or suspected."""
        guard = self._registrar.guard(generation)
        untrue = [one for one in present if self._is_untrue(one)]
        # One that is not in force any more names an earlier incarnation, or who has gone.
        untrue += [
            one
            for one in self._suspicions.values()
            if one.by == self._me and one.lease == guard.lease() and one not in present
        ]
        if untrue:
            return DueWrite(partial(backing_out, untrue))
        mine = {one.member: one for one in present if one.by == self._me}
        here = self._client.keys.in_generation(generation)
        for neighbour in self._signs():
            name, sign = neighbour.member.name, neighbour.sign
            member = snapshot.members.get(name)
            if member is None or member.incarnation != neighbour.member.incarnation:
                continue
            written = mine.get(name)
            if sign is None or (written is None and neighbour.written):
                continue
            if written is None or written.sign != sign:
                return DueWrite(
                    partial(suspicion, here, guard, member, self._me, sign, self._suspicions),
                    written=partial(setattr, neighbour, "written", True),
                )
        return None

    def _is_untrue(self, one: Suspicion) -> bool:
        """Return whether this sidecar knows better: it is the suspected one, or reaches it."""
        if one.member == self._me or (one.member, one.incarnation) in self._alive:
            return True
        neighbour = self._neighbours.get(one.member)
        return one.by == self._me and neighbour is not None and neighbour[0].sign is None

    def _try_suspected(self, snapshot: Snapshot, present: Sequence[Suspicion]) -> None:
        """Try once whether members that others suspect can be reached from here."""
        self._alive &= {(one.member, one.incarnation) for one in present}
        self._looked = {k: at for k, at in self._looked.items() if k in self._suspicions}
        new = [
            one
            for one in present
            if self._me not in (one.by, one.member)
            and self._looked.get(one.key) != one.mod_revision
        ]
        if not new:
            return
        beside = near(self._me, snapshot.members)
        for one in new:
            self._looked[one.key] = one.mod_revision
            if one.member in beside and one.member not in {n.member.name for n in self._signs()}:
                self._tasks.create_task(self._try(snapshot, one), name=f"look at {one.member}")

    async def _try(self, snapshot: Snapshot, one: Suspicion) -> None:
        try:
            (await self._dial(snapshot.members[one.member])).close()
        except PeerAway:
            return
        except PeerMute:
            log.debug("%s does not answer, but its machine does", one.member)
        self._alive.add((one.member, one.incarnation))
        self.wake()

    def _eviction(self, generation: int, one: Eviction, worlds: WorldsSeen) -> GuardedWrites:
        log.warning(
            "evicting %s before its lease ends: %s",
            one.member.name,
            one.reason,
            extra={"event": "evicting"},
        )
        compares, operations = eviction(self._client, generation, one, time())
        return [*worlds.unchanged, *compares], operations
