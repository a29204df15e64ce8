# SPDX-License-Identifier: Apache-2.0
"""Whose key is away is missed only by what the store says, never by what has not been read yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

import pytest

from launcher_shim.c10d.agent import connect
from launcher_shim.c10d.rounds.own_node import OwnNode
from launcher_shim.c10d.rounds.records import Node
from rdzv.job import Registered
from rdzv.store import Delete, KeyValue, Put, TxnResult, WatchEvent
from rdzv.store.memory.client import Faults, MemoryEngine, MemoryStore, transact
from tests.support.clocks.virtual import now
from tests.support.sidecars.runs import (
    GENERATION,
    POLICY,
    RUN,
    TTL_S,
    Client,
    Pod,
    complete,
    pod,
    until,
)
from tests.support.store.transacting import Carry, TransactingStore, Transaction
from tests.support.tasks import beside

pytestmark = pytest.mark.virtual

CONFIRM_S = 1.5


class Unread(Faults):
    """News of the watch can be left unread, as by a process that stands still for a while."""

    def __init__(self) -> None:
        self.read = asyncio.Event()
        self.read.set()

    async def delivering(self) -> None:
        await self.read.wait()


async def world(*pods: Pod) -> list[Client]:
    for one in pods:
        one.policy = replace(POLICY, confirm_s=CONFIRM_S)
    clients = [Client(connect(one.rendezvous)) for one in pods]
    await asyncio.gather(*(client.join() for client in clients))
    await until(lambda: all(map(complete, clients)))
    await until(lambda: all(one.node is not None and one.node.state == "in" for one in pods))
    return clients


async def test_i5_a_return_that_was_not_read_yet_is_no_absence() -> None:
    """b comes back; the news of it is left unread for longer than it takes to miss somebody."""
    engine, faults = MemoryEngine(now), Unread()
    store = MemoryStore(engine)
    async with pod(engine, "a", faults) as a, pod(engine, "b") as b:
        client, _ = await world(a, b)
        await store.lease_revoke(b.lease)
        await until(lambda: "b" not in a.rendezvous.snapshot().nodes)
        vanished_s = now()
        faults.read.clear()
        b.lease += 1000
        await store.lease_grant(b.lease, TTL_S)
        await store.txn([], [Put(GENERATION.member("b"), b"{}", b.lease)])
        await until(lambda: b.node is not None)
        assert "b" not in a.rendezvous.snapshot().nodes
        # It would be missed by now, and the stream is still taken for a healthy one.
        await until(lambda: bool(client.get().wait_list) or now() > vanished_s + CONFIRM_S + 0.5)
        assert a.mirror.healthy(now())
        assert not client.get().wait_list
        faults.read.set()
        await until(lambda: "b" in a.rendezvous.snapshot().nodes)
        assert not client.get().wait_list


async def test_an_absence_that_the_store_confirms_is_one() -> None:
    """b is missed once the store says that it is away, well before its return_s is over."""
    engine = MemoryEngine(now)
    async with pod(engine, "a") as a, pod(engine, "b") as b:
        client, _ = await world(a, b)
        b.lease += 1000
        vanished_s = now()
        await MemoryStore(engine).lease_revoke(b.lease - 1000)
        await until(lambda: bool(client.get().wait_list), 10)
        assert now() - vanished_s >= CONFIRM_S


async def test_a_store_that_was_emptied_confirms_nothing() -> None:
    engine = MemoryEngine(now)
    async with pod(engine, "a") as a:
        await Client(connect(a.rendezvous)).join()
        known_s = a.client.confirmed_s
        a.store.engine = MemoryEngine(now)
        confirming = asyncio.create_task(a.client.confirm())
        moment = now()
        await until(lambda: now() > moment + 0.5)
        assert a.client.confirmed_s == known_s
        a.store.engine = engine
        await confirming
        assert a.client.confirmed_s > moment


ASKS = Node("a", "asking", "n", 1, "10.0.0.1", 7, 0)


@asynccontextmanager
async def own_node(store: MemoryStore) -> AsyncIterator[OwnNode]:
    """The record of a member that is registered, which is written to ``store``."""
    await store.lease_grant(1, TTL_S)
    await store.txn([], [Put(GENERATION.member("a"), b"{}", 1)])
    own = OwnNode(
        key=RUN.node("a"),
        round_key=RUN.round,
        store=store,
        registered=Registered(GENERATION.member("a"), lambda: 1, asyncio.Event().wait),
        random=Random(1),
    )
    async with beside(own.run()):
        own.aim(ASKS)
        yield own


def gone(revision: int) -> WatchEvent:
    return WatchEvent("delete", KeyValue(RUN.node("a"), b"", 0, revision, 0, 0))


async def test_a_loss_that_is_over_when_looked_at_was_one_all_the_same() -> None:
    async with own_node(MemoryStore(MemoryEngine(now))) as own:
        revision = await own.written(ASKS)
        own.agree(None, revision - 1)  # a watch that is behind shows no loss
        assert not own.take_loss()
        own.see(gone(revision + 1))
        back = KeyValue(RUN.node("a"), ASKS.to_json(), revision + 2, revision + 2, 1, 1)
        own.see(WatchEvent("put", back))
        assert own.take_loss()
        assert not own.take_loss()


class LateAnswers(TransactingStore):
    """Counts transactions, and lets others have their turns before it answers."""

    def __init__(self, engine: MemoryEngine) -> None:
        super().__init__(engine)
        self.asked = 0
        self.meanwhile: Callable[[], None] | None = None

    async def transact(self, asked: Transaction, carry: Carry) -> TxnResult:
        self.asked += 1
        await asyncio.sleep(0)
        result = await carry(asked)
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return result


async def test_a_record_that_was_lost_before_its_write_was_answered_is_written_again() -> None:
    store = LateAnswers(MemoryEngine(now))
    async with own_node(store) as own:

        def lose() -> None:
            transact(store.engine, [], [Delete(RUN.node("a"))])
            own.see(gone(store.engine.revision))

        store.meanwhile = lose
        await own.written(ASKS)
        assert (await store.range(RUN.node("a"))).kvs
        assert own.take_loss()


@pytest.mark.parametrize("to", ["an earlier revision", "the revision that the watch has shown"])
async def test_an_own_write_that_is_lost_before_a_watch_shows_it_is_written_again(to: str) -> None:
    store = MemoryStore(MemoryEngine(now))
    async with own_node(store) as own:
        await own.written(ASKS)
        (backup,) = (await store.range(RUN.node("a"))).kvs
        again = replace(ASKS, ask=2)
        own.aim(again)
        lost = await own.written(again)
        await store.txn([], [Put(RUN.node("a"), backup.value, 1)])
        if to == "an earlier revision":
            own.forget()
            own.agree(backup, backup.mod_revision)
        else:
            # Another member has written by now, and so the watch has come to the answer's revision.
            own.agree(backup, lost)
        await own.written(again)
        (kv,) = (await store.range(RUN.node("a"))).kvs
        assert kv.value == again.to_json()


async def test_a_record_is_written_again_if_the_lost_store_answers_after_the_restored_one() -> None:
    store = LateAnswers(MemoryEngine(now))
    async with own_node(store) as own:

        def lose() -> None:
            transact(store.engine, [], [Delete(RUN.node("a"))])
            own.forget()
            own.agree(None, 0)

        store.meanwhile = lose
        await own.written(ASKS)
        assert (await store.range(RUN.node("a"))).kvs


async def test_a_store_restored_unnoticed_is_not_asked_again_and_again_for_a_record() -> None:
    store = LateAnswers(MemoryEngine(now))
    async with own_node(store) as own:
        await own.written(ASKS)
        # What the record rests on is there again at once, and the watch tells of nothing yet.
        store.engine, store.asked = MemoryEngine(now), 0
        await store.lease_grant(1, TTL_S)
        await store.txn([], [Put(GENERATION.member("a"), b"{}", 1)])
        again = replace(ASKS, ask=2)
        own.aim(again)
        for _ in range(200):
            await asyncio.sleep(0)
        assert store.asked < 10
        own.forget()
        own.agree(None, 0)
        await own.written(again)
