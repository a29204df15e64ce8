# SPDX-License-Identifier: Apache-2.0
"""Runs over the memory store, without a launcher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from random import Random

from launcher_shim.c10d.agent import TorchAgent, connect
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy
from launcher_shim.c10d.rounds.records import Node, Round
from launcher_shim.c10d.rounds.rendezvous import Rendezvous
from launcher_shim.c10d.state_codec import SENTINEL, Flavour, NodeDesc, TorchState, decode, encode
from rdzv.job import JobClient, Registered
from rdzv.keys import JobKeys
from rdzv.reconcile import Kernel
from rdzv.records.quarantine import Stay
from rdzv.store import Put
from rdzv.store.memory.client import Faults, MemoryEngine, MemoryStore
from tests.support.clocks.virtual import now

GENERATION = JobKeys("team", "digits").in_generation(1)


RUN = GENERATION.run("digits")


LATER = datetime(2030, 1, 1, tzinfo=UTC)


TTL_S = 60


POLICY = RoundPolicy(2, 4, last_call_s=0.2, first_call_s=0.2, confirm_s=0.3, hold_s=0.1)


LISTED = RoundMembers(frozenset("abcd"))


@dataclass
class Pod:
    """One sidecar's rendezvous, registered by hand; its lease can be changed under it."""

    name: str
    store: MemoryStore
    client: JobClient
    lease: int
    policy: RoundPolicy = POLICY
    membership: RoundMembers = LISTED
    jumped_s: float = 0.0
    registered: asyncio.Event = field(default_factory=asyncio.Event)
    looks: int = 0
    died: list[Stay] = field(default_factory=list)
    """The last stays of torchruns here that have ended by themselves."""

    def __post_init__(self) -> None:
        self.mirror = self.client.mirror
        self.registered.set()
        guard = Registered(
            GENERATION.member(self.name),
            lambda: self.lease if self.registered.is_set() else None,
            self.registered.wait,
        )
        self.rendezvous = Rendezvous(
            Kernel(
                *(self.client, guard.fence, guard.again),
                *(lambda: now() + self.jumped_s, Random(self.name)),
            ),
            guard,
            member=self.name,
            drains=GENERATION.drains,
            keys=RUN,
            run_id="digits",
            launched=self.policy,
            policy=lambda: self.policy,
            membership=self._membership,
            died=self.died.append,
        )

    def _membership(self, current: Round) -> RoundMembers:
        self.looks += 1
        return self.membership

    @property
    def node(self) -> Node | None:
        """The record as this pod sees it in the store."""
        return self.rendezvous.snapshot().nodes.get(self.name)


class Client:
    """A client that does with views what torch does, one request at a time."""

    def __init__(self, agent: TorchAgent, pid: int = 7) -> None:
        self.agent = agent
        self.me = NodeDesc("10.0.0.1", pid, 0)
        self.blob = SENTINEL

    @property
    def state(self) -> TorchState:
        return decode(self.blob)[0]

    def get(self) -> TorchState:
        self.blob = self.agent.get_state()
        return self.state

    async def send(self, desired: TorchState) -> TorchState:
        self.blob = await self.agent.compare_set(self.blob, encode(desired, Flavour(True)))
        return self.state

    async def join(self) -> TorchState:
        before = TorchState() if self.blob == SENTINEL else self.state
        joined = replace(
            before,
            participants={**before.participants, self.me: 0},
            last_heartbeats={self.me: LATER},
        )
        return await self.send(joined)

    async def leave(self) -> TorchState:
        others = {n: r for n, r in self.state.participants.items() if n != self.me}
        return await self.send(replace(self.state, participants=others))

    async def close(self) -> TorchState:
        return await self.send(replace(self.state, closed=True))


@asynccontextmanager
async def pod(
    engine: MemoryEngine, name: str, faults: Faults | None = None, *, lease: int | None = None
) -> AsyncIterator[Pod]:
    lease = lease or ord(name)
    direct = MemoryStore(engine)
    await direct.lease_grant(lease, TTL_S)
    await direct.txn([], [Put(GENERATION.member(name), b"{}", lease)])
    store = MemoryStore(engine, faults=faults)
    client = JobClient.of(store, GENERATION.job, clock=now)
    one = Pod(name, store, client, lease)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(client.watching.run()),
            tasks.create_task(one.rendezvous.run()),
        ]
        try:
            yield one
        finally:
            for task in running:
                task.cancel()


@asynccontextmanager
async def world(
    engine: MemoryEngine, *faults: Faults | None
) -> AsyncIterator[tuple[list[Pod], list[Client]]]:
    """A world of pods, by name from a on, with a client each; one for each of ``faults``."""
    async with AsyncExitStack() as stack:
        pods = [
            await stack.enter_async_context(pod(engine, name, fault))
            for name, fault in zip("abcd", faults, strict=False)
        ]
        clients = [Client(connect(one.rendezvous)) for one in pods]
        await asyncio.gather(*(client.join() for client in clients))
        await until(lambda: all(map(complete, clients)))
        yield pods, clients


async def until(what: Callable[[], bool], timeout_s: float = 90) -> None:
    deadline = now() + timeout_s
    while not what():
        assert now() < deadline
        await asyncio.sleep(0.01)


def complete(client: Client) -> bool:
    return client.get().complete and client.me in client.state.participants
