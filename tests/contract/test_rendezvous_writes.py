# SPDX-License-Identifier: Apache-2.0
"""What the rendezvous writes, and when it must not, over a store that misbehaves. No torch here."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from launcher_shim.c10d.agent import connect
from launcher_shim.c10d.rounds.records import Node, Round
from launcher_shim.c10d.state_codec import (
    SENTINEL,
)
from rdzv.job import JobClient
from rdzv.store import KeyValue, Put, WatchEvent
from rdzv.store.memory.client import Faults, MemoryEngine, MemoryStore
from tests.support.clocks.virtual import now
from tests.support.sidecars.jobs import LosesOne, SlowAnswers
from tests.support.sidecars.runs import (
    GENERATION,
    POLICY,
    RUN,
    Client,
    Pod,
    complete,
    pod,
    until,
    world,
)
from tests.support.tasks import beside

pytestmark = pytest.mark.virtual


async def test_a_world_is_shown_at_once_where_the_watch_is_ahead_of_the_answer() -> None:
    engine, slow = MemoryEngine(now), SlowAnswers(0.2)
    async with pod(engine, "a", slow) as a, pod(engine, "b", slow) as b:
        for one in (a, b):
            one.policy = replace(POLICY, max_nodes=2, hold_s=60.0)
        clients = [Client(connect(one.rendezvous)) for one in (a, b)]
        async with asyncio.timeout(40):
            states = await asyncio.gather(*(client.join() for client in clients))
        assert all(state.complete for state in states)


async def test_a_watch_that_lags_makes_no_storm_of_lost_races() -> None:
    class Lagging(Faults):
        sent = 0

        async def before(self, call: str) -> None:
            self.sent += call == "txn"

        async def delivering(self) -> None:
            await asyncio.sleep(1.2)

    engine, lags = MemoryEngine(now), [Lagging() for _ in range(3)]
    async with (
        pod(engine, "a", lags[0]) as a,
        pod(engine, "b", lags[1]) as b,
        pod(engine, "c", lags[2]) as c,
    ):
        clients = [Client(connect(one.rendezvous)) for one in (a, b, c)]
        await asyncio.gather(*(client.join() for client in clients))
        await until(lambda: all(map(complete, clients)), 20)
        clients[0].agent.closed()
        await until(lambda: all(bool(client.get().wait_list) for client in clients[1:]), 20)
        assert max(lag.sent for lag in lags) <= 5


async def test_keys_of_a_round_are_filled_only_once_it_cannot_be() -> None:
    key = b"/torch.rendezvous.digits.0/MASTER_ADDR"
    async with world(MemoryEngine(now), None, None) as (_, clients):
        agent = clients[0].agent
        assert agent.filler(key) is None
        clients[1].agent.closed()
        await until(lambda: agent.filler(key) is not None)
        assert agent.filler(key.replace(b".0/", b".7/")) is None
        assert agent.filler(b"/torch.rendezvous.digits.0/torchelastic/agent/last") is None
        assert agent.filler(b"/some/key") is None


async def test_the_exit_barrier_survives_an_answer_that_is_lost() -> None:
    faults = LosesOne()
    async with pod(MemoryEngine(now), "a", faults) as a:
        a.policy = replace(POLICY, min_nodes=1)
        client = Client(connect(a.rendezvous))
        await client.join()
        await until(lambda: complete(client))
        faults.loses = "answer"
        await client.agent.exit_barrier()
        await until(lambda: a.rendezvous.round.finishing)


@pytest.mark.parametrize("steps", [("closes",), ("leaves", "closes"), (), ("leaves",)])
async def test_who_gives_up_waiting_has_not_died(steps: tuple[str, ...]) -> None:
    async with pod(MemoryEngine(now), "a") as a:
        client = Client(connect(a.rendezvous))
        assert not (await client.join()).complete  # one more is needed
        if "leaves" in steps:
            await client.leave()
        if "closes" in steps:
            await client.close()
        client.agent.closed()
        assert len(a.died) == (not steps)
        assert a.rendezvous.round.closed == ""


async def test_a_sidecar_that_stood_still_itself_calls_nobody_hung() -> None:
    engine = MemoryEngine(now)
    async with pod(engine, "a") as a:
        a.policy = replace(POLICY, hung_s=2.0)
        await Client(connect(a.rendezvous)).join()
        began = now()
        a.jumped_s = 100.0
        await MemoryStore(engine).txn([], [Put(RUN.node("b"), b"")])
        await until(lambda: a.node is not None and a.node.state == "left")
        assert a.node is not None
        assert a.node.left_reason == "hung"
        assert now() - began > 1.9


async def test_one_that_falls_silent_in_the_exit_barrier_is_done_and_not_lost() -> None:
    async with world(MemoryEngine(now), None, None) as ((a, *_), clients):
        await clients[0].agent.exit_barrier()
        a.policy = replace(POLICY, hung_s=0.5)
        await until(lambda: a.node is not None and a.node.state == "left")
        assert a.node is not None
        assert a.node.left_reason == "done"
        assert a.died == []


async def test_requests_that_lead_nowhere_are_slowed_down() -> None:
    async with pod(MemoryEngine(now), "a") as a:
        client = Client(connect(a.rendezvous))
        await client.join()
        began, sent = now(), 0
        while now() - began < 3:
            await client.send(client.state)
            sent += 1
        assert sent <= 8


async def test_one_whose_place_another_one_has_taken_asks_in_vain_and_is_slowed_down() -> None:
    async with pod(MemoryEngine(now), "a") as a:
        a.policy = replace(POLICY, min_nodes=1)
        older, newer = (Client(connect(a.rendezvous), pid) for pid in (7, 8))
        for client in (older, newer):
            await client.join()
            await until(partial(complete, client))
        began, sent = now(), 0
        while now() - began < 3:
            await older.join()
            sent += 1
        assert sent <= 8
        assert a.node is not None
        assert (a.node.nonce, a.node.state) == (newer.agent.claim.nonce, "in")
        older.agent.closed()
        assert a.node.state == "in"


@pytest.mark.parametrize(
    "blob", [b"", b"%%%", b"AAAA", b"gASVIAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOU"]
)
async def test_i8_what_is_no_state_changes_nothing(blob: bytes) -> None:
    engine = MemoryEngine(now)
    async with pod(engine, "a") as a:
        agent = connect(a.rendezvous)
        revision = engine.revision
        assert await agent.compare_set(SENTINEL, blob) == SENTINEL
        client = Client(agent)
        await client.join()
        assert await agent.compare_set(blob, client.blob) == client.blob
        assert engine.revision == revision + 1


async def test_one_that_ends_before_it_has_begun_hears_of_the_store_no_more() -> None:
    store = MemoryStore(MemoryEngine(now))
    client = JobClient.of(store, GENERATION.job, clock=now)
    rendezvous, mirror = Pod("a", store, client, 1).rendezvous, client.mirror
    rounds = [KeyValue(RUN.round, Round(n).to_json(), n, n, 1, 0) for n in (1, 2)]
    mirror.apply([WatchEvent("put", rounds[0])], 1)
    rendezvous.end()
    mirror.apply([WatchEvent("put", rounds[1])], 2)
    assert rendezvous.round.number == 1


async def test_the_membership_is_not_looked_at_for_each_event() -> None:
    store = MemoryStore(MemoryEngine(now))
    client = JobClient.of(store, GENERATION.job, clock=now)
    one = Pod("a", store, client, 1)
    for revision in range(1, 100):
        kv = KeyValue(GENERATION.member(f"m{revision}"), b"", revision, revision, 1, 0)
        client.mirror.apply([WatchEvent("put", kv)], revision)
    assert one.looks == 0
    async with beside(one.rendezvous.run()):
        await until(lambda: one.looks > 0)


async def test_a_round_that_is_due_waits_for_the_registration_without_looking_again() -> None:
    engine = MemoryEngine(now)
    async with pod(engine, "a") as a:
        a.registered.clear()
        nodes = [Node(member, "asking", "n", 1, "10.0.0.1", 7, 0) for member in "bcde"]
        puts = [Put(RUN.node(one.member), one.to_json()) for one in nodes]
        await MemoryStore(engine).txn([], puts)
        # Its turn comes after that of the four, none of whom has a sidecar here.
        await asyncio.sleep(2)
        looks = a.looks
        await asyncio.sleep(2)
        # The watch may tell of progress meanwhile; a timer would have it look twenty times.
        assert a.looks <= looks + 5
        assert not a.rendezvous.round.complete
        a.registered.set()
        await until(lambda: a.rendezvous.round.complete)
