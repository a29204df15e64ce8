# SPDX-License-Identifier: Apache-2.0
"""Sidecars' endpoints in one process, each with its own store client and mirror, and their load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from time import monotonic

from agent.parts import job_client
from agent.surroundings import MemberSettings, Sockets, Surroundings
from launcher_shim.pod.relay import Relay
from rdzv.errors import StoreAmbiguous, StoreUnavailable
from rdzv.keys import JobKeys
from rdzv.members.registration import Held
from rdzv.store import Store, TxnResult
from rdzv.store.memory.client import Faults, MemoryEngine, MemoryStore
from tests.support.histories.recorded import History, HistoryClient, history_client
from tests.support.ports import free_ports
from tests.support.sidecars.endpoints import Pod, serving
from tests.support.sidecars.jobs import identity
from tests.support.store.transacting import Carry, TransactingStore, Transaction

NODES = (2, 4)
REGISTERS = ("/r0", "/r1", "/r2")
COUNTERS = ("/n0", "/n1")
LOGS = ("/l0",)
HASTE_CHANGES = 0.02
"""With so many calls of a client a stretch of haste begins, or ends."""
TURNS_MAX = 8
"""Of the event loop, that a call or a batch of the watch takes in haste, each way."""
OWN_SHARE = 0.5
"""Of what a client does, so much is with a key of its own."""
FLAGS = tuple(f"/f{number}" for number in range(40))
"""Set once each, by whoever comes first; waited for by others, as a torchrun's ranks are."""


@asynccontextmanager
async def pod(
    store: Store,
    keys: JobKeys,
    name: str,
    lease_ttl_s: float,
    *,
    uid: str = "",
    unix_path: str | None = None,
    on_held: Callable[[Held], Awaitable[None]] | None = None,
) -> AsyncIterator[Pod]:
    """A registered sidecar; its watch goes through the same store client as all else."""
    around = Surroundings(store=store, clock=monotonic, boot_clock=monotonic, random=Random())
    least, most = NODES
    who = replace(identity(name, uid, least=least, most=most), job_uid=f"uid-{keys.job_name}")
    settings = MemberSettings(keys=keys, identity=who, lease_ttl_s=lease_ttl_s, last_call_s=1.0)
    client, sockets = job_client(around, keys), Sockets(c10d_port=0, c10d_path=unix_path)
    watching = client.watching.run()
    async with serving(
        around, settings, client, sockets, watching, fenced=True, on_held=on_held
    ) as made:
        yield made


@asynccontextmanager
async def pods(
    stores: Sequence[Store], keys: JobKeys, lease_ttl_s: float = 10.0
) -> AsyncIterator[list[Pod]]:
    """One sidecar on each store client."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(pod(store, keys, f"w-{number}", lease_ttl_s))
            for number, store in enumerate(stores)
        ]


class Relayed:
    """A sidecar behind the relay of its training container: it is replaced, its clients stay."""

    def __init__(self, store: Store, keys: JobKeys, name: str, folder: Path) -> None:
        self.lives = 0
        self._store, self._keys, self._name = store, keys, name
        self._path = str(folder / "c10d.sock")
        self._relay: Relay

    @property
    def port(self) -> int:
        """Where clients connect."""
        return self._relay.port

    @asynccontextmanager
    async def running(self, ends: Callable[[int], bool]) -> AsyncIterator[None]:
        """Have one sidecar after the other; ``ends`` says when so many have been enough.

        One that ends leaves requests behind that nobody knows the outcome of.
        """
        self._relay = await self._listening()
        try:
            async with asyncio.TaskGroup() as tasks:
                replacing = tasks.create_task(self._live(ends))
                yield
                replacing.cancel()
        finally:
            await self._relay.close()

    async def _listening(self) -> Relay:
        """Listen at a port that nobody has taken meanwhile."""
        for port in free_ports(5):
            relay = Relay(port, self._path)
            with suppress(OSError):
                await relay.listen()
                return relay
        raise AssertionError("five ports that were free are taken")

    async def _live(self, ends: Callable[[int], bool]) -> None:
        while True:
            async with pod(
                self._store, self._keys, self._name, 10.0, unix_path=self._path
            ) as running:
                self.lives += 1
                while not ends(self.lives):
                    await running.client.mirror.changed_after(running.client.mirror.sequence)


class Unsteady(Faults):
    """Calls take their time, and some get lost on the way there or back; so do watches.

    For stretches all of them take a few turns of the event loop and no time: what one brings then
    meets what others are in the midst of.
    """

    def __init__(self, random: Random, share: float) -> None:
        self._random = random
        self._share = share
        self._hasty = False
        self.calm = True

    async def before(self, call: str) -> None:
        if self._random.random() < HASTE_CHANGES:
            self._hasty = not self._hasty
        await self._pause((0.0, 0.005))
        if not self.calm and self._random.random() < self._share:
            raise StoreUnavailable(f"{call}: lost on the way there")

    async def after(self, call: str) -> None:
        await self._pause((0.0, 0.005))
        if not self.calm and self._random.random() < self._share:
            raise StoreAmbiguous(f"{call}: lost on the way back")

    async def delivering(self) -> None:
        if not self.calm:
            await self._pause((self._random.choice((0.0, 0.01, 0.1)),) * 2)

    async def _pause(self, seconds: tuple[float, float]) -> None:
        if not self._hasty:
            await asyncio.sleep(self._random.uniform(*seconds))
            return
        for _ in range(self._random.randrange(TURNS_MAX)):
            await asyncio.sleep(0)


class StragglingStore(TransactingStore):
    """A client some of whose writes arrive long after it has given them up.

    As those do that a frozen member of etcd still has in its sockets.
    """

    def __init__(self, engine: MemoryEngine, faults: Unsteady, random: Random) -> None:
        super().__init__(engine, faults=faults)
        self._unsteady = faults
        self._random = random
        self._late: set[asyncio.Task[None]] = set()

    async def transact(self, asked: Transaction, carry: Carry) -> TxnResult:
        if not self._unsteady.calm and self._random.random() < 0.06:
            late = asyncio.create_task(self._arrive(asked))
            self._late.add(late)
            late.add_done_callback(self._late.discard)
            await asyncio.sleep(0.02)
            raise StoreAmbiguous("txn: it arrives later")
        return await carry(asked)

    async def _arrive(self, asked: Transaction) -> None:
        await asyncio.sleep(self._random.uniform(0.05, 0.2))
        await MemoryStore(self.engine).txn(asked.compares, asked.then, asked.otherwise)


class HistoryLoad:
    """Clients that do all that torch's can do, at random, on a few keys."""

    def __init__(
        self, history: History, random: Random, *, every_s: float = 0.0, prefix: str = ""
    ) -> None:
        self.history = history
        self._random = random
        self._prefix = prefix
        self._every_s = every_s
        self._values = 0

    async def run(self, ports: Sequence[int], *, clients: int, done: Callable[[], bool]) -> None:
        """Run so many clients at each port; each ends its last operation, however long it takes."""
        async with asyncio.TaskGroup() as tasks:
            for port in ports:
                for _ in range(clients):
                    tasks.create_task(self._live(port, done))

    async def _live(self, port: int, done: Callable[[], bool]) -> None:
        async with history_client(self.history, port) as client:
            while not done():
                await self._act(client)
                await asyncio.sleep(self._random.uniform(0, 2 * self._every_s))

    async def _act(self, client: HistoryClient) -> None:
        random = self._random
        register = self._key(REGISTERS)
        if random.random() < OWN_SHARE:
            await self._use_own(client)
            return
        match random.randrange(20):
            case 0 | 1 | 2:
                await client.set(register, self._value())
            case 3 | 4 | 5 | 6 | 7:
                await client.get(self._key((*REGISTERS, *COUNTERS)))
            case 8 | 9:
                seen = await client.get(register) or ""
                await client.compare_set(register, seen, self._value())
            case 10:
                await client.delete(register)
            case 11 | 12 | 13:
                await client.add(self._key(COUNTERS), random.choice((1, 1, 5, -2)))
            case 14:
                await client.set(self._key(COUNTERS), str(random.randrange(1000)))
            case 15:
                await client.append(self._key(LOGS), f"{self._value()};")
            case 16:
                await client.get(self._key(LOGS))
            case 17:
                await client.check(register)
            case 18:
                await client.set(self._key(FLAGS), self._value())
            case _:
                await client.wait(self._key(FLAGS), 0.2)

    async def _use_own(self, client: HistoryClient) -> None:
        """Set and read a key that no other client uses, beside others that do so with theirs."""
        own = f"{self._prefix}/own{client.number}"
        await client.set(own, self._value())
        await client.get(own)

    def _key(self, keys: Sequence[str]) -> str:
        return self._prefix + self._random.choice(keys)

    def _value(self) -> str:
        self._values += 1
        return f"v{self._values}"
