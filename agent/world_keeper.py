# SPDX-License-Identifier: Apache-2.0
"""One pod's part in a world that changes in place: its file, its report, its turn to decide.

A pod whose ranks take no part costs a look at its run directory now and then, and no write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from time import time

from agent.rundir.files import RunDir
from agent.world_report import IDLE, prefix_of, report_of, root_of, seat_name, shown
from launcher_shim.c10d.endpoint import Endpoint
from launcher_shim.c10d.rounds.inputs import RunSnapshot
from launcher_shim.c10d.rounds.own_node import Evaluation
from launcher_shim.c10d.rounds.records import Node, Round, Seat
from launcher_shim.c10d.rounds.rendezvous import Rendezvous
from launcher_shim.rundir import layout
from rdzv.errors import LeaseLost, RecordError, StoreError
from rdzv.job import JobClient, Registered
from rdzv.keys import RunKeys
from rdzv.members.registrar import Registrar
from rdzv.reconcile import Loop, Outlook
from rdzv.records.codec import by_last_name
from rdzv.records.job import HistoryEntry
from rdzv.records.world import WorldChange, WorldReport
from rdzv.sentences import Diary
from rdzv.store import Compare, Operation, Put
from rdzv.world import Lasting, WorldDecision, WorldPolicy, WorldSnapshot, decide

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Poll interval of the ranks' progress while none takes part."""
TRAIN_LOOK_S = 0.05
"""The same while a world trains: a collective that fails is seen so late."""
CHANGE_LOOK_S = 0.01
"""The same during a change: the ranks stand still for it, several times in a row."""
TURN_S = 0.2
"""Seconds between the turns of two members to write what is due."""


class WorldKeeper(Loop):
    """The keeper. ``clock`` is monotonic, in seconds; ``port``: that of the ranks' store."""

    def __init__(
        self,
        run_dir: RunDir,
        client: JobClient,
        registrar: Registrar,
        endpoint: Endpoint,
        *,
        port: int,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(clock)
        self._run_dir = run_dir
        self._client = client
        self._registrar = registrar
        self._endpoint = endpoint
        self._store = f"127.0.0.1:{port}"
        self._member = registrar.identity.member
        self._policy = WorldPolicy()
        self._former: set[tuple[int, int]] = set()
        """Processes of workers that a torchrun had before it asked for its present place."""
        self._looked: tuple[Seat | None, set[tuple[int, int]]] = (None, set())
        """The place of its torchrun at the last look, and the processes that had published."""
        self._shown = WorldChange()
        """The change that the ranks are shown since before their last look."""
        self._records: tuple[int, WorldChange, dict[str, WorldReport]] | None = None
        self._lasting = Lasting()
        self._due: tuple[WorldChange, float] | None = None
        self._content = b""
        self._diary = Diary(log)

    async def step(self) -> Outlook:
        """Take part in what is due; while nothing goes on, a change of the store wakes nothing."""
        sequence = self._client.mirror.sequence
        look_s = LOOK_S
        try:
            if not self._content:
                self._content = await asyncio.to_thread(self._restore)
            look_s = await self._take_part()
        except (StoreError, LeaseLost) as error:
            self._diary.say(f"retrying a write about the world: {error}")
        except OSError as error:
            self._diary.say(f"the run directory cannot be used, retrying: {error.strerror}")
        changed = partial(self._client.mirror.changed_after, sequence)
        return Outlook(None if look_s == LOOK_S else changed, self.clock() + look_s)

    def _restore(self) -> bytes:
        content = self._run_dir.content(layout.WORLD)
        if content is None:
            self._run_dir.put(layout.WORLD, IDLE)
        return content or IDLE

    async def _take_part(self) -> float:
        """Look at the ranks and the store once, act, and return when to look again."""
        found, asked = self._present(), self._shown
        if found is None:
            return LOOK_S
        lines = await asyncio.to_thread(self._run_dir.ranks)
        processes = {(line.pid, line.started) for line in lines}
        rendezvous, keys = found
        own, current = rendezvous.own_node, rendezvous.round
        seat = own.seat if own is not None and own.state == "in" else None
        if seat != self._looked[0]:
            # Those of its former place have ended, and what they have published is of the past.
            self._former |= processes if seat is None else self._looked[1]
        self._looked = (seat, processes)
        if own is None or seat is None:
            self._former |= processes
            if own is not None and own.state == "asking":
                await self._put(IDLE)  # Its workers have ended, and the next are not there yet.
            return TRAIN_LOOK_S if current.world else LOOK_S
        change, reports = self._read(keys)
        fresh = [line for line in lines if (line.pid, line.started) not in self._former]
        takes_part = any(line.in_world is not None for line in fresh)
        if not takes_part and not reports:
            return LOOK_S
        if change.round != current.number:
            await self._put(IDLE)
            self._shown = WorldChange()
        else:
            was_in = any(line.in_world and line.in_world.number > 0 for line in fresh)
            await self._show(change, current, keys, was_in=was_in, own_round=own.own)
            members = rendezvous.snapshot().membership
            if was_in and own.own and members.may_join(self._member):
                rendezvous.place.ask_again()
        # By what they were shown before this look: a vote must not be older than its question.
        before = reports.get(self._member)
        report = report_of(fresh, own.seat, asked, before)
        if report is not None and (before is None or report != replace(before, mod_revision=0)):
            await self._tell(keys, report)
        if takes_part:
            await self._decide(rendezvous, keys)
        during = change.phase in ("hold", "form", "broken") or (report is not None and report.ready)
        return CHANGE_LOOK_S if during else TRAIN_LOOK_S

    def _present(self) -> tuple[Rendezvous, RunKeys] | None:
        """Return the run that a torchrun of this pod is in; None if there is none."""
        generation = self._registrar.generation
        for run_id, rendezvous in self._endpoint.rendezvous().items():
            if generation is not None and rendezvous.place.has_node:
                return rendezvous, self._client.keys.in_generation(generation).run(run_id)
        return None

    def _read(self, keys: RunKeys) -> tuple[WorldChange, dict[str, WorldReport]]:
        mirror = self._client.mirror
        if self._records is not None and self._records[0] == mirror.sequence:
            return self._records[1:]
        change = WorldChange()
        for kv in mirror.under(keys.world):
            if kv.key == keys.world:
                try:
                    change = WorldChange.from_kv(kv)
                except RecordError as error:
                    self._diary.say(f"replacing an unreadable record: {error}")
                    change = WorldChange(mod_revision=kv.mod_revision)
        reports = by_last_name(
            mirror.under(keys.world_reports), keys.world_reports, WorldReport.from_kv
        )
        self._records = (mirror.sequence, change, reports)
        return change, reports

    async def _show(
        self,
        change: WorldChange,
        current: Round,
        keys: RunKeys,
        *,
        was_in: bool,
        own_round: bool,
    ) -> None:
        content = shown(
            change,
            current.world,
            [seat.member for seat in current.frozen],
            self._member,
            was_in=was_in,
            own_round=own_round,
            closed=current.closed == "success",
            store=self._store,
            root=root_of(keys),
        )
        await self._put(content)
        self._shown = change

    async def _put(self, content: bytes) -> None:
        if content != self._content:
            await asyncio.to_thread(self._run_dir.put, layout.WORLD, content)
            self._content = content

    async def _tell(self, keys: RunKeys, report: WorldReport) -> None:
        registered = self._guard()
        lease = registered.lease()
        if lease is None:
            raise LeaseLost("the member is not registered")
        put = Put(keys.world_report(self._member), report.to_json(), lease)
        await self._client.commit([registered.holds()], [put])

    async def _decide(self, rendezvous: Rendezvous, keys: RunKeys) -> None:
        evaluation = rendezvous.evaluation()
        change, reports = self._read(keys)
        revision = self._client.mirror.certain_revision
        snapshot = self._snapshot(rendezvous, evaluation, change, reports)
        now = self.clock()
        since_s = self._lasting.since_s(now, snapshot, self._client.mirror.healthy_for_s(now))
        decision = decide(now, since_s, snapshot, self._policy)
        self._diary.say(f"the world: {decision.reason}")
        if decision.change is None:
            self._due = None
            return
        if self._due is None or self._due[0] != decision.change:
            turns = [one for one in snapshot.members if one not in snapshot.lost]
            turn = turns.index(self._member) if self._member in turns else len(turns)
            self._due = (decision.change, now + TURN_S * turn)
        if now >= self._due[1]:
            await self._write(evaluation, snapshot, decision, keys, revision)

    def _snapshot(
        self,
        rendezvous: Rendezvous,
        evaluation: Evaluation,
        change: WorldChange,
        reports: dict[str, WorldReport],
    ) -> WorldSnapshot:
        stored = evaluation.stored
        current, nodes = stored.round, stored.nodes
        seats = {name: seat_name(node.seat) for name, node in nodes.items() if node.state == "in"}
        newcomers = stored.in_order_of_claims(
            node
            for node in nodes.values()
            if current.takes_in(node) and node.seat not in current.frozen
        )
        welcome = stored.membership.may_join
        members = tuple(seat.member for seat in current.frozen)
        forming = change.seats if change.round == current.number else ()
        away = {name for name in forming if name not in seats and name not in members}
        return WorldSnapshot(
            change=change,
            round=current.number,
            live=current.complete and not (current.closed or current.ends or current.finishing),
            world=current.world,
            members=members,
            lost=frozenset(evaluation.standings.lost) | away,
            leaving=stored.membership.leaving,
            newcomers=tuple(node.member for node in newcomers if welcome(node.member)),
            reports={
                name: one for name, one in reports.items() if one.seat == seats.get(name, "-")
            },
            older=self._older(stored),
            # A join that the ranks were asked to save for waits for their steps, in a world.
            reforms=evaluation.reform.reason if evaluation.reform.cause not in ("", "join") else "",
            sizes=rendezvous.policy(),
        )

    def _older(self, stored: RunSnapshot) -> frozenset[str]:
        """Return the members of the world, or that ask, whose sidecar knows no such world."""
        of = self._client.membership.snapshot().members
        there = {seat.member for seat in stored.round.frozen} | {n.member for n in stored.asking()}
        return frozenset(name for name in there if name in of and of[name].knows_no_worlds)

    async def _write(
        self,
        evaluation: Evaluation,
        snapshot: WorldSnapshot,
        decision: WorldDecision,
        keys: RunKeys,
        revision: int,
    ) -> None:
        """Carry ``decision`` out if nothing that it rests on has changed."""
        stored, change = evaluation.stored, decision.change
        assert change is not None
        before, current = snapshot.change, stored.round
        since = revision + 1
        drains = self._client.keys.in_generation(keys.generation).drains
        compares = [
            Compare(keys.round, "mod", "=", current.mod_revision),
            Compare(keys.world, "mod", "=", before.mod_revision),
            Compare(keys.nodes, "mod", "<", since, prefix=True),
            Compare(keys.world_reports, "mod", "<", since, prefix=True),
            Compare(drains, "mod", "<", since, prefix=True),
            self._guard().holds(),
        ]
        operations: list[Operation] = [Put(keys.world, change.to_json())]
        after = changed_round(current, decision, before, stored.nodes)
        if after != current:
            operations.append(Put(keys.round, after.to_json()))
        if decision.action in ("formed", "fall back"):
            details: dict[str, object] = {"round": current.number, "world": before.number}
            if decision.action == "formed":
                details |= {"members": list(before.seats), "step": before.step}
            entry = HistoryEntry("world", self._member, decision.reason, time(), details)
            operations += self._client.history(entry)
        result = await self._client.commit(compares, operations)
        self._due = None
        if not result.succeeded:
            return
        log.info(
            "the world: %s: %s",
            decision.action,
            decision.reason,
            extra={"event": "world", "action": decision.action, "epoch": change.epoch},
        )
        if decision.action == "formed":
            root = root_of(keys)
            # torch's clients put a slash before the name of a key.
            there, present = f"/{root}", f"/{prefix_of(root, before.number)}"
            await self._endpoint.forget_shared(there.encode(), present.encode())

    def _guard(self) -> Registered:
        generation = self._registrar.generation
        if generation is None:
            raise LeaseLost("the member is not registered")
        return self._registrar.guard(generation)


def changed_round(
    current: Round, decision: WorldDecision, before: WorldChange, nodes: Mapping[str, Node]
) -> Round:
    """Return the round after ``decision``: its seats are those of the world that has formed."""
    if decision.action == "formed":
        return replace(
            current,
            world=before.number,
            frozen=tuple(nodes[name].seat for name in before.seats),
            began=current.began or current.frozen,
        )
    if decision.action == "fall back":
        if decision.whole:
            return replace(current, world=0)
        return replace(current, ends=decision.reason)
    return current
