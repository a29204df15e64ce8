# SPDX-License-Identifier: Apache-2.0
"""torch's own rendezvous handlers, each in a strand, behind real sidecar parts on one engine."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _NodeDesc,
)

from agent.surroundings import MemberSettings, Sockets
from launcher_shim.c10d.request_order import RelayNumbers
from launcher_shim.c10d.rounds.inputs import RoundPolicy
from launcher_shim.c10d.rounds.records import Node, Round
from launcher_shim.c10d.rounds.rendezvous import Rendezvous
from launcher_shim.c10d.rounds.stages import round_prefix
from launcher_shim.c10d.session import LauncherSession
from launcher_shim.tcpstore import wire
from rdzv.job import JobClient
from rdzv.members.registration import Held
from rdzv.mirror import Mirror
from rdzv.reconcile import first_of
from rdzv.records.drain import Commit, Drain
from rdzv.records.quarantine import TERMS, Terms
from rdzv.store import Put
from rdzv.store.memory.client import MemoryEngine, MemoryStore, transact
from tests.support.clocks import strands
from tests.support.clocks.strands import Strand, torch_in_strands
from tests.support.clocks.virtual import now
from tests.support.sidecars.endpoints import Pod, serving
from tests.support.sidecars.jobs import KEYS, identity, loaded, surroundings
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

ALONE = replace(QUICK, min_nodes=1)

DEADLINE_S = 20.0
"""Whoever waits for somebody who does not come waits for longer."""

HERE = KEYS.in_generation(1)
DONE = b"torchelastic/agent/terminal_state/num_members"
LAST_OUT = "torchelastic/agent/terminal_state/last_member"

MONITOR_S = 0.1
"""Between two looks of torch's agent at its workers, and at who waits."""


class Files:
    """What outlives a sidecar, by name."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def content(self, name: str) -> bytes | None:
        return self._files.get(name)

    def put(self, name: str, content: bytes) -> None:
        self._files[name] = content


class Sidecar:
    """One sidecar's member and endpoint, with a cable to the store that can be cut."""

    pod: Pod

    def __init__(self, job: Job, name: str, held: Held | None) -> None:
        self.name = name
        self.cut = Cut()
        self.store = MemoryStore(job.engine, faults=self.cut)
        self._client = JobClient.of(self.store, KEYS, clock=now)
        self._job = job
        self._held = held
        self._serves = asyncio.Event()

    @property
    def rendezvous(self) -> Rendezvous:
        """That of the run, once a torchrun has asked for it."""
        return self.pod.endpoint.rendezvous()[RUN_ID]

    @property
    def nodes(self) -> dict[str, Node]:
        """The nodes of the run as it sees them, by member."""
        run = self.pod.endpoint.rendezvous().get(RUN_ID)
        return {} if run is None else dict(run.snapshot().nodes)

    async def serves(self) -> None:
        """Wait until it is registered."""
        async with asyncio.timeout(DEADLINE_S):
            await self._serves.wait()

    async def run(self) -> None:
        """Run it until the task ends, as kill -9 ends a sidecar: nothing is written any more."""
        job = self._job
        policy = job.policy
        who = identity(self.name, least=policy.min_nodes, most=policy.max_nodes)
        settings = MemberSettings(
            keys=KEYS,
            # With a UID the job has one life, even if all of its pods are gone for a while.
            identity=replace(who, job_uid="uid-digits"),
            lease_ttl_s=job.ttl_s,
            last_call_s=policy.last_call_s,
            first_call_s=policy.first_call_s,
            quarantine=job.terms,
        )
        around = surroundings(self.store, self.name)
        async with AsyncExitStack() as self._following:
            await self._following.enter_async_context(loaded(self._client))
            async with serving(
                *(around, settings, self._client, Sockets(c10d_port=None)),
                held=self._held,
                kept=job.kept[self.name],
            ) as self.pod:
                self._serves.set()
                await asyncio.Event().wait()

    async def move(self, engine: MemoryEngine) -> None:
        """Let the store be another one from now on, as after a restore."""
        self.store.engine = engine
        await self._following.aclose()
        await self._following.enter_async_context(self._client.following())


@dataclass
class Container:
    """One life of a pod's training container."""

    pod: str
    number: int
    trained: bool = False
    """Whether a torchrun was started in it: then its relay lets no other one be passed over."""


class Line:
    """What torch's backend takes for its store: a session behind a relay, asked from a strand.

    A request that is under way as its sidecar ends is sent to the next one.
    """

    _session: LauncherSession
    _numbers: RelayNumbers

    def __init__(self, container: Container, number: int) -> None:
        self.calls: list[tuple[wire.Request, float]] = []
        """What was asked, and when."""
        self.stores = asyncio.Event()
        """Whether what its torchrun sets is stored at once; else it waits until it may be."""
        self.stores.set()
        parts = (f"{container.pod} {container.number}", f"{number}")
        self._id = b"".join(part.encode().ljust(wire.SESSION_BYTES // 2) for part in parts)
        self._note = b""
        self._turn = asyncio.Lock()
        self._sent = 0
        self._again: tuple[int, ...] = ()
        self._there, self._gone = asyncio.Event(), asyncio.Event()

    def meet(self, sidecar: Sidecar) -> None:
        """Let its relay come to a sidecar."""
        preface = wire.Preface(self._id, self._sent + 1, self._again, self._note)
        self._numbers, self._gone = RelayNumbers(preface, self._keep), asyncio.Event()
        author = f"{sidecar.name}.{self._id.hex()}"
        self._session = LauncherSession(sidecar.pod.endpoint.sessions, author, self._numbers)
        self._there.set()

    def part(self) -> None:
        """Lose the sidecar."""
        self._there.clear()
        self._gone.set()

    def close(self) -> None:
        """End the client."""
        if self._there.is_set():
            self._session.closed()

    def get(self, key: str) -> bytes:
        return self._ask(wire.Get(_named(key)))[8:]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._ask(wire.CompareSet(_named(key), expected.encode(), desired.encode()))[8:]

    def set(self, key: str, value: bytes) -> None:
        strands.wait(self.stores.wait)
        self._ask(wire.Set(_named(key), value))

    def wait_and_get(self, key: str) -> bytes:
        self._ask(wire.Wait((_named(key),)))
        return self.get(key)

    def _ask(self, request: wire.Request) -> bytes:
        self.calls.append((request, strands.Time.monotonic()))
        return strands.wait(lambda: self.serve(request))

    async def serve(self, request: wire.Request) -> bytes:
        """Send a request, as often as it takes; return its answer."""
        async with self._turn:
            self._sent += 1
            self._again = (self._sent,)
            while True:
                await self._there.wait()
                gone = self._gone
                assert self._numbers.next() == self._sent
                answer = self._session.handle(request)
                if not isinstance(answer, bytes):
                    answer = await first_of(answer, gone.wait())
                if isinstance(answer, bytes):
                    self._again = ()
                    return answer

    def _keep(self, note: bytes) -> None:
        self._note = note


def _named(key: str) -> bytes:
    """Name a key as torch's client does to its server."""
    return f"/{key}".encode()


class RoundStore:
    """The keys of one round, as far as a handler uses them."""

    def __init__(self, line: Line, number: int) -> None:
        self._line = line
        self._prefix = round_prefix(RUN_ID, number).decode()[1:]

    def set(self, key: str, value: bytes) -> None:
        self._line.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        return self._line.wait_and_get(self._prefix + key)


@dataclass(frozen=True)
class World:
    """One world that an agent was given."""

    round: int
    rank: int
    size: int
    master_addr: str
    master_port: int


class Torchrun:
    """torch's handler in a strand, and as much of its agent's loop as a rendezvous sees."""

    def __init__(self, name: str, line: Line, make: Callable[[], DynamicRendezvousHandler]) -> None:
        self.line = line
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
        self._strand.task.add_done_callback(lambda _: self.line.close())

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
        sent = self._sent()
        return max((sum(at <= other < at + 1 for other in sent) for at in sent), default=0)

    def compare_sets(self, since_s: float = 0.0) -> int:
        """How many compare-and-sets it sent from ``since_s`` on."""
        return sum(at_s >= since_s for at_s in self._sent())

    def _sent(self) -> list[float]:
        return [at_s for request, at_s in self.line.calls if isinstance(request, wire.CompareSet)]

    async def comes_to_the_exit_barrier(self) -> None:
        """Do as torch does once the workers are done."""
        assert self.world is not None
        await self.line.serve(wire.Add(round_prefix(RUN_ID, self.world.round) + DONE, 1))

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
                strands.wait(self.comes_to_the_exit_barrier)
            case "wait":
                strands.wait(self.comes_to_the_exit_barrier)
                handler._get_store().get(LAST_OUT)
        handler.shutdown()
        return True

    def _form(self, handler: DynamicRendezvousHandler) -> None:
        info: RendezvousInfo = handler.next_rendezvous()
        number = handler._state_holder.state.round
        first = info.bootstrap_store_info
        world = World(number, info.rank, info.world_size, first.master_addr, first.master_port)
        self.worlds.append(world)


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
    kept: dict[str, Files] = field(default_factory=lambda: defaultdict(Files))
    """What outlives the sidecars of each pod."""
    numbers: Iterator[int] = field(default_factory=count)

    async def sidecar(self, name: str, held: Held | None = None) -> Sidecar:
        """Start a sidecar and wait until it is registered."""
        one = Sidecar(self, name, held)
        self.sidecars[name] = one
        self.running[name] = self.tasks.create_task(one.run())
        await one.serves()
        return one

    async def stop_sidecar(self, name: str) -> None:
        """End a sidecar as kill -9 does: nothing is written any more."""
        for torchrun in self.everyone:
            if torchrun.name == name:
                torchrun.line.part()
        task = self.running.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def come_back(self, name: str) -> None:
        """Start a sidecar again, in a pod whose torchrun lives on."""
        self.torchruns[name].line.meet(
            await self.sidecar(name, self.sidecars[name].pod.registrar.held)
        )

    @property
    def mirror(self) -> Mirror:
        """What the sidecar that was started first has of the store."""
        return next(iter(self.sidecars.values())).pod.client.mirror

    def container(self, name: str) -> Container:
        """Start the training container of a pod, or start it again."""
        return Container(name, next(self.numbers))

    def _line(self, container: Container) -> Line:
        line = Line(container, next(self.numbers))
        line.meet(self.sidecars[container.pod])
        return line

    async def asks(self, container: Container, line: bytes, run_id: str = RUN_ID) -> bytes:
        """Ask as ``torchrun`` of the run directory does, before the image's own is started."""
        asking = self._line(container)
        may = b"" if container.trained else wire.MAY_PASS
        answer = await asking.serve(wire.CompareSet(wire.STAGE + run_id.encode(), may, line))
        asking.close()
        return answer[8:]

    async def passes(self, container: Container, line: bytes, run_id: str = RUN_ID) -> bool:
        """Ask that; return whether the stage is passed over."""
        return await self.asks(container, line, run_id) == wire.PASSED

    async def ran(self, *containers: Container) -> list[int]:
        """Run a torchrun in each, which ends well; return the sizes of their worlds."""
        torchruns = [self.torchrun(one.pod, container=one) for one in containers]
        await self.until(lambda: all(torchrun.worlds for torchrun in torchruns))
        for torchrun in torchruns:
            torchrun.order("finish")
        await self.until(lambda: all(torchrun.ended for torchrun in torchruns))
        assert [torchrun.failure for torchrun in torchruns] == [None] * len(torchruns)
        return [torchrun.worlds[-1].size for torchrun in torchruns]

    def closed(self) -> dict[str, str]:
        """How each run stands in the store."""
        named = [(HERE.run_of_round(kv.key), kv) for kv in self.mirror.under(HERE.runs)]
        return {name: Round.from_kv(kv).closed for name, kv in named if name is not None}

    def torchrun(
        self,
        name: str,
        *,
        container: Container | None = None,
        max_nodes: int | None = None,
        join_s: float = 60,
        node: tuple[str, int, int] | None = None,
    ) -> Torchrun:
        """Start a torchrun on the sidecar ``name``."""
        container = container or self.container(name)
        container.trained = True
        line = self._line(container)

        def make() -> DynamicRendezvousHandler:
            handler = DynamicRendezvousHandler.from_backend(
                RUN_ID,
                dist.HashStore(),
                C10dRendezvousBackend(line, RUN_ID),
                self.policy.min_nodes,
                max_nodes or self.policy.max_nodes,
                local_addr=f"10.0.0.{name}",
                timeout=RendezvousTimeout(join=timedelta(seconds=join_s)),
            )
            handler._heartbeat_lock = strands.Lock()
            handler._get_store = lambda: RoundStore(line, handler._state_holder.state.round)
            if node is not None:
                handler._this_node = handler._op_executor._node = _NodeDesc(*node)
            return handler

        torchrun = Torchrun(name, line, make)
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
        key = round_prefix(RUN_ID, 0) + LAST_OUT.encode()
        transact(self.engine, [], [Put(HERE.run(RUN_ID).value(key), b"over")])

    async def passed(self, seconds: float) -> float:
        """Let time pass in which something must not happen; return when it began."""
        began_s = now()
        await asyncio.sleep(seconds)
        return began_s

    async def world(self, names: str, within_s: float = DEADLINE_S) -> int:
        """Wait until these nodes are the world, all of one round; return its number.

        All have the address of its first rank.
        """

        def formed() -> bool:
            worlds = [self.torchruns[name].world for name in names]
            if any(world is None or world.size != len(names) for world in worlds):
                return False
            same = {
                (world.round, world.master_addr, world.master_port) for world in worlds if world
            }
            ranks = {world.rank for world in worlds if world}
            return len(same) == 1 and ranks == set(range(len(names)))

        await self.until(formed, within_s)
        world = self.torchruns[names[0]].world
        assert world is not None
        return world.round

    def leaves(self, names: str) -> None:
        """Let these drain."""
        drains = [Drain(f"uid-{name}", name, "evicted", "prestop") for name in names]
        puts = [Put(HERE.drain(drain.pod_uid), drain.to_json()) for drain in drains]
        transact(self.engine, [], puts)

    def grants(self, names: str) -> None:
        """Let these leave the first world, once all have saved."""
        uids = tuple(f"uid-{name}" for name in names)
        commit = Commit(1, RUN_ID, 0, "done", 40, uids, granted=uids)
        transact(self.engine, [], [Put(HERE.commit, commit.to_json())])

    def story(self) -> str:
        """Where everybody stands, for a failing test."""
        lines = ["", *(f"{t.name}: {t.worlds} {t.failure!r}" for t in self.everyone)]
        for name, one in self.sidecars.items():
            for rendezvous in one.pod.endpoint.rendezvous().values():
                word = rendezvous.snapshot()
                lines.append(f"{name}: {word.round} | {rendezvous.reason}")
                lines += [f"    {node}" for node in word.nodes.values()]
        return "\n".join(lines)


@asynccontextmanager
async def job(
    policy: RoundPolicy,
    ttl_s: float = 60.0,
    terms: Terms = TERMS,
    world: str = "",
    sidecars: str = "",
) -> AsyncIterator[Job]:
    """A job whose first world is of the nodes in ``world``; all of it is gone afterwards.

    ``sidecars``: whose sidecars alone are there.

    ``ttl_s`` is to be short where a lease has to end, and only there.
    """
    seconds = {f.name: getattr(policy, f.name) for f in fields(policy) if f.name.endswith("_s")}
    with (
        torch_in_strands(),
        patch("launcher_shim.c10d.endpoint.RoundPolicy", partial(RoundPolicy, **seconds)),
        # Nobody here decides on drains: who joins waits for no save.
        patch("launcher_shim.c10d.rounds.inputs.joins_wait", lambda *_: False),
    ):
        async with asyncio.TaskGroup() as tasks:
            one = Job(MemoryEngine(now), policy, ttl_s, tasks, terms)
            try:
                for name in sidecars:
                    await one.sidecar(name)
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
