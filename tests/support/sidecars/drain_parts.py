# SPDX-License-Identifier: Apache-2.0
"""What a sidecar that drains stands on in tests: its store, its round, its run directory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Literal

from agent.rundir.files import RunDir
from launcher_shim.c10d.rounds.records import Node, Round
from rdzv.drain.inputs import LiveRound
from rdzv.listing import decide
from rdzv.membership import Membership
from rdzv.mirror import Mirror
from rdzv.store import Compare, Operation, Put, TxnResult
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from rdzv.store.memory.faults import Cut
from tests.support.sidecars.jobs import KEYS

RUN = "digits"
HERE = KEYS.in_generation(1)
FIRST_PORT = 20_000
"""``MASTER_PORT`` of round 0; it names the round, nobody listens there."""

Moment = Literal["sending", "answering"]


class Cable(Cut):
    """Between one sidecar and the store: can be cut, and can hold transactions back."""

    def __init__(self) -> None:
        super().__init__()
        self._jammed: str | None = None
        self._freed = asyncio.Event()
        self._wires: list[tuple[Moment, str, asyncio.Event]] = []
        self.on_txn: Callable[[Moment, Sequence[Operation]], None] = lambda moment, operations: None

    def jam(self, prefix: str) -> None:
        """Hold every transaction that puts a key under ``prefix``, until the cable is mended."""
        self._jammed = prefix
        self._freed.clear()

    def mend(self) -> None:
        """Let through again whatever was cut or jammed."""
        super().mend()
        self._jammed = None
        self._freed.set()

    def trip(self, moment: Moment, prefix: str) -> asyncio.Event:
        """Hold the next transaction that puts a key under ``prefix``; the event tells of it."""
        tripped = asyncio.Event()
        self._wires.append((moment, prefix, tripped))
        return tripped

    async def passing(self, moment: Moment, operations: Sequence[Operation]) -> None:
        self.on_txn(moment, operations)
        keys = [operation.key for operation in operations if isinstance(operation, Put)]
        for wire in tuple(self._wires):
            when, prefix, tripped = wire
            if when == moment and any(key.startswith(prefix) for key in keys):
                self._wires.remove(wire)
                tripped.set()
                await asyncio.Event().wait()
        jammed = self._jammed
        if moment == "sending" and jammed is not None and any(k.startswith(jammed) for k in keys):
            await self._freed.wait()


class CabledStore(MemoryStore):
    """One sidecar's client of the store."""

    def __init__(self, engine: MemoryEngine, cable: Cable) -> None:
        super().__init__(engine, faults=cable)
        self.cable = cable

    async def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        timeout_s: float = 0.5,
    ) -> TxnResult:
        await self.cable.passing("sending", then)
        result = await super().txn(compares, then, otherwise, timeout_s=timeout_s)
        await self.cable.passing("answering", then)
        return result


class Rounds:
    """What drains ask of an endpoint, made of the round and the nodes as the mirror shows them."""

    def __init__(self, mirror: Mirror, membership: Membership) -> None:
        self._mirror = mirror
        self._membership = membership

    async def caught_up(self) -> None:
        """The mirror is never behind itself."""

    def live_round(self) -> LiveRound | None:
        snapshot = self._membership.snapshot()
        keys = KEYS.in_generation(snapshot.job.generation if snapshot.job else 1).run(RUN)
        kv = self._mirror.kvs.get(keys.round)
        if kv is None:
            return None
        current = Round.from_kv(kv)
        nodes = {node.member: node for node in map(Node.from_kv, self._mirror.under(keys.nodes))}
        members = tuple(seat.member for seat in current.frozen)
        listed = {member.name for member in decide(snapshot).listed}
        asking = {name for name, node in nodes.items() if node.state == "asking"}
        return LiveRound(
            run=RUN,
            number=current.number,
            complete=current.complete,
            members=members,
            left=frozenset(m for m in members if m in nodes and nodes[m].state == "left"),
            newcomers=bool((asking & listed) - {*members}),
            finishing=current.finishing,
            closed=bool(current.closed),
            master=f"127.0.0.1:{FIRST_PORT + current.number}",
            mod_revision=current.mod_revision,
            asking=frozenset(asking & listed),
        )

    async def live_round_changed(self, known: LiveRound | None) -> LiveRound | None:
        while (now := self.live_round()) == known:
            await self._mirror.changed_after(self._mirror.sequence)
        return now


class MortalRunDir(RunDir):
    """A run directory that nothing of a sidecar which was killed writes to."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._lock = threading.Lock()
        self._dead = False

    def put(self, name: str, content: bytes) -> None:
        with self._lock:
            if not self._dead:
                super().put(name, content)

    def die(self) -> None:
        with self._lock:
            self._dead = True
