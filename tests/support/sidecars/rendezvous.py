# SPDX-License-Identifier: Apache-2.0
"""torch's own rendezvous handlers, each in a strand, behind real sidecar parts on one engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from random import Random
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _NodeDesc,
)

from agent.parts import job_client, member_parts
from agent.surroundings import MemberSettings
from launcher_shim.c10d.agent import TorchAgent, connect
from launcher_shim.c10d.quarantining import Quarantining
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy, run_membership
from launcher_shim.c10d.rounds.records import Round
from launcher_shim.c10d.rounds.rendezvous import Rendezvous
from launcher_shim.rundir.rank_reports import StepLine
from rdzv.members.registration import Held
from rdzv.records.quarantine import TERMS, Terms
from rdzv.store import Put
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.clocks import strands
from tests.support.clocks.strands import Strand, torch_in_strands
from tests.support.clocks.virtual import now
from tests.support.sidecars.jobs import KEYS, identity, surroundings
from tests.support.store.cut import Cut

RUN_ID = "digits"

QUICK = RoundPolicy(
    min_nodes=2,
    max_nodes=4,
    last_call_s=0.5,
    first_call_s=30.0,
    confirm_s=0.4,
    return_s=4.0,
    orphan_hold_s=60.0,
    hung_s=30.0,
)

DEADLINE_S = 20.0
"""Whoever waits for somebody who does not come waits for longer."""

MONITOR_S = 0.1
"""Between two looks of torch's agent at its workers, and at who waits."""


@dataclass
class Call:
    """One call of an agent on its sidecar, for counting."""

    what: str
    at_s: float


class Sidecar:
    """The parts of one sidecar that a rendezvous needs, with a cable that can be cut."""

    def __init__(
        self,
        engine: MemoryEngine,
        name: str,
        policy: RoundPolicy,
        ttl_s: float,
        held: Held | None,
        terms: Terms,
    ) -> None:
        self.name = name
        self.cut = Cut()
        self.store = MemoryStore(engine, faults=self.cut)
        around = surroundings(self.store, name)
        self._client = job_client(around, KEYS)
        self.mirror, self.job = self._client.mirror, self._client.membership
        self.leaving: frozenset[str] = frozenset()
        self.granted: frozenset[str] = frozenset()
        who = identity(name, least=policy.min_nodes, most=policy.max_nodes)
        # With a UID the job has one life, even if all of its pods are gone for a while.
        settings = MemberSettings(
            keys=KEYS,
            identity=replace(who, job_uid="uid-digits"),
            lease_ttl_s=ttl_s,
        )
        member = member_parts(around, settings, self._client, held=held)
        self.registrar = member.registrar
        keys = KEYS.in_generation(1)
        registered = self.registrar.guard(1)
        self.told: list[StepLine] = []
        """How far the ranks of its pod are."""
        self.quarantining = Quarantining(
            member.kernel,
            self.registrar.identity,
            terms=terms,
            steps=lambda: tuple(self.told),
        )
        self.rendezvous = Rendezvous(
            replace(member.kernel, clock=now, random=Random(name)),
            registered,
            member=name,
            drains=keys.drains,
            keys=keys.run(RUN_ID),
            run_id=RUN_ID,
            launched=policy,
            policy=lambda: policy,
            membership=self._membership,
            came=self.quarantining.came,
            entered=self.quarantining.entered,
            died=self.quarantining.died,
        )

    def _membership(self, current: Round) -> RoundMembers:
        snapshot, failures = self.job.snapshot(), self.job.failures()
        listing = self.job.listing()
        membership = run_membership(snapshot, listing, RUN_ID, current, failures=failures)
        return replace(
            membership,
            listed=membership.listed - self.leaving,
            leaving=self.leaving,
            granted=self.granted,
            joins_wait=False,
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._watching = tasks.create_task(self._client.watching.run())
            tasks.create_task(self.registrar.run())
            tasks.create_task(self.rendezvous.run())
            tasks.create_task(self.quarantining.run())

    def move(self, engine: MemoryEngine) -> None:
        """Let the store be another one from now on, as after a restore."""
        self.store.engine = engine
        self._watching.cancel()
        self._watching = self._tasks.create_task(self._client.watching.run())


class Wire:
    """What torch's backend takes for a store: it calls the agent, and waits in its strand."""

    def __init__(self, agent: TorchAgent) -> None:
        self.agent = agent
        self.calls: list[Call] = []
        self.stores = asyncio.Event()
        """Whether what its agent sets is stored at once; else it waits until it may be."""
        self.stores.set()

    def get(self, key: str) -> bytes:
        return self._call("get", self._get)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._call(
            "compare_set", lambda: self.agent.compare_set(expected.encode(), desired.encode())
        )

    def exit_barrier(self) -> None:
        self._call("add", self.barrier)

    def wait(self, kv: dict[str, bytes], key: str) -> bytes:
        return self._call("wait", lambda: self._value(kv, key))

    async def _value(self, kv: dict[str, bytes], key: str) -> bytes:
        while True:
            value = kv.get(key, self.agent.filler(key.encode()))
            if value is not None:
                return value
            await asyncio.sleep(0.02)

    async def _get(self) -> bytes:
        return self.agent.get_state()

    async def barrier(self) -> bytes:
        await self.agent.exit_barrier()
        return b""

    def _call(self, what: str, make: Callable[[], Coroutine[Any, Any, bytes]]) -> bytes:
        self.calls.append(Call(what, strands.Time.monotonic()))

        async def serve() -> bytes:
            self.agent.request_began()
            try:
                return await make()
            finally:
                self.agent.request_ended()

        return strands.wait(serve)


class RoundStore:
    """The keys of one round, as far as a handler uses them; unset ones may be filled."""

    def __init__(self, wire: Wire, kv: dict[str, bytes], number: int) -> None:
        self._wire = wire
        self._kv = kv
        self._prefix = f"/torch.rendezvous.{RUN_ID}.{number}/"

    def set(self, key: str, value: bytes) -> None:
        strands.wait(self._wire.stores.wait)
        self._kv[self._prefix + key] = value

    def get(self, key: str) -> bytes:
        return self._wire.wait(self._kv, self._prefix + key)


@dataclass(frozen=True)
class World:
    """One world that an agent was given."""

    round: int
    rank: int
    size: int


class Torchrun:
    """torch's handler in a strand, and as much of its agent's loop as a rendezvous sees."""

    def __init__(
        self,
        wire: Wire,
        name: str,
        make: Callable[[], DynamicRendezvousHandler],
    ) -> None:
        self.wire = wire
        self.name = name
        self.worlds: list[World] = []
        self.failure: BaseException | None = None
        self.restarts = 0
        self.awake = asyncio.Event()
        self.awake.set()
        self.can_stop = asyncio.Event()
        """Whether its workers end when it tells them to; it goes on asking meanwhile."""
        self.can_stop.set()
        self._make = make
        self._handler: DynamicRendezvousHandler | None = None
        self._commands: list[str] = []
        self._strand = Strand(asyncio.get_running_loop(), self._run)
        self._strand.task.add_done_callback(lambda _: self.wire.agent.closed())

    @property
    def world(self) -> World | None:
        return self.worlds[-1] if self.worlds else None

    @property
    def ended(self) -> bool:
        return self._strand.task.done()

    def order(self, command: str) -> None:
        """What happens to it next.

        ``rejoin``: its workers failed, and it has restarts left. ``fail``: it has none left.
        ``finish``: its workers are done. ``wait``: they are, and it waits for those of the others
        in torch's exit barrier.
        """
        self._commands.append(command)

    def kill(self) -> None:
        """As kill -9 does, at any moment: the kernel closes the connection."""
        self._strand.kill()

    def busiest_second(self) -> int:
        """The most compare-and-sets that it sent within a second."""
        sent = [call.at_s for call in self.wire.calls if call.what == "compare_set"]
        return max((sum(at <= other < at + 1 for other in sent) for at in sent), default=0)

    def give_time(self, join_s: float) -> None:
        """Let it have so many seconds whenever its time to join begins anew from now on."""
        handler = self._handler
        assert handler is not None
        handler._settings.timeout._join = timedelta(seconds=join_s)

    def shut_down(self) -> None:
        """As torch does after any exception: close the rendezvous, wherever it stands."""
        handler = self._handler
        assert handler is not None
        Strand(asyncio.get_running_loop(), handler.shutdown)

    def compare_sets(self, since_s: float = 0.0) -> int:
        """How many compare-and-sets it sent from ``since_s`` on."""
        return sum(c.what == "compare_set" and c.at_s >= since_s for c in self.wire.calls)

    def _run(self) -> None:
        try:
            self._handler = self._make()
            self._live(self._handler)
        except Exception as failure:
            self.failure = failure
            if self._handler is not None:
                # As torch's launcher does after any exception, wherever it stands.
                self._handler.shutdown()

    def _live(self, handler: DynamicRendezvousHandler) -> None:
        self._form(handler)
        while True:
            strands.Time.sleep(MONITOR_S)
            if not self.awake.is_set():
                # As SIGSTOP does to all threads of a process.
                handler._stop_heartbeats()
                strands.wait(self.awake.wait)
                handler._start_heartbeats()
            if self._commands and self._obey(handler, self._commands.pop(0)):
                return
            if handler.num_nodes_waiting() > 0:
                self.restarts += 1
                strands.wait(self.can_stop.wait)
                self._form(handler)

    def _obey(self, handler: DynamicRendezvousHandler, command: str) -> bool:
        """Return whether that was the end."""
        match command:
            case "end":
                return True
            case "rejoin":
                self._form(handler)
                return False
            case "finish":
                self.wire.exit_barrier()
            case "wait":
                self.wire.exit_barrier()
                handler._get_store().get("torchelastic/agent/terminal_state/last_member")
        handler.shutdown()
        return True

    def _form(self, handler: DynamicRendezvousHandler) -> None:
        info: RendezvousInfo = handler.next_rendezvous()
        number = handler._state_holder.state.round
        self.worlds.append(World(number, info.rank, info.world_size))


@dataclass
class Job:
    """Sidecars and torchruns of one job on one engine."""

    engine: MemoryEngine
    policy: RoundPolicy
    ttl_s: float
    tasks: asyncio.TaskGroup
    terms: Terms = TERMS
    sidecars: dict[str, Sidecar] = field(default_factory=dict)
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    torchruns: dict[str, Torchrun] = field(default_factory=dict)
    everyone: list[Torchrun] = field(default_factory=list)
    kv: dict[str, bytes] = field(default_factory=dict)

    async def sidecar(self, name: str, held: Held | None = None) -> Sidecar:
        """Start a sidecar and wait until it is registered."""
        one = Sidecar(self.engine, name, self.policy, self.ttl_s, held, self.terms)
        self.sidecars[name] = one
        self.running[name] = self.tasks.create_task(one.run())
        async with asyncio.timeout(30):
            await one.registrar.registered.wait()
        return one

    async def stop_sidecar(self, name: str) -> None:
        """End a sidecar as kill -9 does: nothing is written any more."""
        task = self.running.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def torchrun(
        self,
        name: str,
        *,
        max_nodes: int | None = None,
        join_s: float = 60,
        node: tuple[str, int, int] | None = None,
    ) -> Torchrun:
        """Start a torchrun on the sidecar ``name``."""
        wire = Wire(connect(self.sidecars[name].rendezvous))

        def make() -> DynamicRendezvousHandler:
            handler = DynamicRendezvousHandler.from_backend(
                RUN_ID,
                dist.HashStore(),
                C10dRendezvousBackend(wire, RUN_ID),
                self.policy.min_nodes,
                max_nodes or self.policy.max_nodes,
                local_addr=f"10.0.0.{name}",
                timeout=RendezvousTimeout(join=timedelta(seconds=join_s)),
            )
            handler._heartbeat_lock = strands.Lock()
            handler._get_store = lambda: RoundStore(
                wire, self.kv, handler._state_holder.state.round
            )
            if node is not None:
                handler._this_node = handler._op_executor._node = _NodeDesc(*node)
            return handler

        torchrun = Torchrun(wire, name, make)
        self.torchruns[name] = torchrun
        self.everyone.append(torchrun)
        return torchrun

    async def node(self, name: str, **options: Any) -> Torchrun:
        """Start a sidecar and its torchrun."""
        await self.sidecar(name)
        return self.torchrun(name, **options)

    async def all_of(self, names: str) -> None:
        """Start torchruns once the sidecars of all of them are there."""
        for name in names:
            await self.sidecar(name)
        for name in names:
            self.torchrun(name)

    async def until(self, what: Callable[[], bool], within_s: float = DEADLINE_S) -> None:
        """Wait until ``what`` holds; on failure say where everybody stands."""
        deadline_s = now() + within_s
        while not what():
            assert now() < deadline_s, self.story()
            await asyncio.sleep(0.02)

    def end_time_in_exit_barrier(self) -> None:
        """Let whoever stands in the exit barrier of the first world wait for nobody any more."""
        barrier = f"/torch.rendezvous.{RUN_ID}.0/torchelastic/agent/terminal_state/"
        self.kv[f"{barrier}last_member"] = b"over"

    async def passed(self, seconds: float) -> float:
        """Let time pass in which something must not happen; return when it began."""
        began_s = now()
        await asyncio.sleep(seconds)
        return began_s

    async def world(self, names: str, within_s: float = DEADLINE_S) -> int:
        """Wait until these nodes are the world, all of one round; return its number."""

        def formed() -> bool:
            worlds = [self.torchruns[name].world for name in names]
            if any(world is None or world.size != len(names) for world in worlds):
                return False
            return len({world.round for world in worlds if world}) == 1 and {
                world.rank for world in worlds if world
            } == set(range(len(names)))

        await self.until(formed, within_s)
        world = self.torchruns[names[0]].world
        assert world is not None
        return world.round

    async def tell(self, *, leaving: str = "", granted: str = "") -> None:
        """Let every sidecar know who leaves, as a change to the drains in the store would."""
        for sidecar in self.sidecars.values():
            sidecar.leaving = frozenset(leaving + granted)
            sidecar.granted = frozenset(granted)
        told = Put(f"{KEYS.in_generation(1).prefix}told", f"{leaving} {granted}".encode())
        async with asyncio.timeout(10):
            await MemoryStore(self.engine).txn([], [told])

    def story(self) -> str:
        """Where everybody stands, for a failing test."""
        lines = ["", *(f"{t.name}: {t.worlds} {t.failure!r}" for t in self.everyone)]
        for name, one in self.sidecars.items():
            word = one.rendezvous.snapshot()
            lines.append(f"{name}: {word.round} | {one.rendezvous.reason}")
            lines += [f"    {node}" for node in word.nodes.values()]
        return "\n".join(lines)


@asynccontextmanager
async def job(
    policy: RoundPolicy,
    ttl_s: float = 60.0,
    terms: Terms = TERMS,
    world: str = "",
) -> AsyncIterator[Job]:
    """A job whose first world is of the nodes in ``world``; all of it is gone afterwards.

    ``ttl_s`` is to be short where a lease has to end, and only there.
    """
    with torch_in_strands():
        async with asyncio.TaskGroup() as tasks:
            one = Job(MemoryEngine(now), policy, ttl_s, tasks, terms)
            try:
                await one.all_of(world)
                if world:
                    assert await one.world(world) == 0
                yield one
            finally:
                for torchrun in one.everyone:
                    torchrun.kill()
                await one.until(lambda: all(torchrun.ended for torchrun in one.everyone))
                for task in one.running.values():
                    task.cancel()
