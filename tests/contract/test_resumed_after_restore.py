# SPDX-License-Identifier: Apache-2.0
"""A torchrun outlives its sidecar, and the next one finds an older record of it in the store.

The store was restored from a backup while no sidecar was there that knew better.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from launcher_shim.c10d.agent import connect
from launcher_shim.c10d.rounds.records import Node, Round, Seat
from rdzv.store import Delete, Put
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.clocks.virtual import now
from tests.support.sidecars.runs import RUN, TTL_S, Client, Pod, complete, pod, until, world

pytestmark = pytest.mark.virtual

FORMER_LEASE = 1
BEFORE = Node("a", "in", "before", 2, "10.0.0.1", 6, 0, round=1)
OUTLIVES = Node("a", "in", "outlives", 3, "10.0.0.1", 7, 0, round=2)


@asynccontextmanager
async def beside_backup(node: Node) -> AsyncIterator[tuple[Pod, MemoryStore]]:
    """A sidecar that knows ``node`` from a backup, under the lease of a former sidecar."""
    engine = MemoryEngine(now)
    store = MemoryStore(engine)
    await store.lease_grant(FORMER_LEASE, TTL_S)
    await store.txn([], [Put(RUN.node("a"), node.to_json(), FORMER_LEASE)])
    async with pod(engine, "a") as one:
        await until(lambda: one.node is not None and one.node.nonce == node.nonce)
        yield one, store


def is_stored(one: Pod, node: Node) -> bool:
    return one.node is not None and replace(one.node, mod_revision=0) == node


@pytest.mark.parametrize("gone", [False, True], ids=["its client lives", "it is gone"])
async def test_a_place_that_a_torchrun_before_it_had_is_taken_once_nobody_claims_it(
    gone: bool,
) -> None:
    async with beside_backup(BEFORE) as (a, store):
        agent = connect(a.rendezvous, "outlives", OUTLIVES)
        assert agent.node is None
        if gone:
            agent.closed()
        await store.lease_revoke(FORMER_LEASE)
        await until(lambda: a.node is None if gone else is_stored(a, OUTLIVES))
        assert agent.node == (None if gone else OUTLIVES)


async def test_a_place_whose_torchrun_comes_back_for_it_stays_its_own() -> None:
    async with beside_backup(BEFORE) as (a, store):
        replaced = connect(a.rendezvous, "outlives", OUTLIVES)
        counts = connect(a.rendezvous, "before", BEFORE)
        restored_at = store.engine.revision
        await store.lease_revoke(FORMER_LEASE)
        await until(lambda: a.node is not None and a.node.mod_revision > restored_at)
        assert is_stored(a, BEFORE)
        assert counts.node is not None
        assert replaced.node is None


ASKED = replace(OUTLIVES, state="asking", round=0)


@pytest.mark.parametrize(
    ("stored", "noted"),
    [(ASKED, OUTLIVES), (OUTLIVES, ASKED)],
    ids=["the note, which is rewritten", "the record"],
)
async def test_of_record_and_note_of_one_torchrun_the_newer_counts(
    stored: Node, noted: Node
) -> None:
    async with beside_backup(stored) as (a, _):
        agent = connect(a.rendezvous, "outlives", noted)
        await until(lambda: is_stored(a, OUTLIVES))
        assert agent.node is not None
        assert replace(agent.node, mod_revision=0) == OUTLIVES


async def test_i11_torchruns_started_again_form_a_world_though_their_former_round_is_put_back() -> (
    None
):
    """A sidecar that saw the restore after they had asked takes their records for the backup's."""
    engine = MemoryEngine(now)
    former = (Seat("a", "before", 2), Seat("b", "before", 2))
    async with pod(engine, "a") as a, pod(engine, "b") as b:
        for one in (a, b):
            one.policy = replace(one.policy, orphan_hold_s=10)
        clients = [Client(connect(one.rendezvous)) for one in (a, b)]
        joining = asyncio.gather(*(client.join() for client in clients))
        await until(lambda: a.node is not None and b.node is not None)
        lost = Round(3, True, frozen=former, restored=True, restored_at=engine.revision)
        await MemoryStore(engine).txn([], [Put(RUN.round, lost.to_json())])
        await until(lambda: a.rendezvous.round.number == b.rendezvous.round.number == 3)
        await joining
        await until(lambda: a.rendezvous.round.number == 4, timeout_s=20)
        for client in clients:
            await client.join()
        await until(lambda: all(map(complete, clients)))


async def test_i11_who_waits_for_an_address_that_the_store_has_lost_is_not_waited_for() -> None:
    """The backup has the round, so that nobody puts it back, and not what rank 0 stored for it."""
    engine = MemoryEngine(now)
    store = MemoryStore(engine)
    address = b"/torch.rendezvous.digits.0/MASTER_ADDR"
    async with world(engine, None, None) as ((a, b), clients):
        await store.txn([], [Put(RUN.value(address), b"10.0.0.1")])
        await until(lambda: all(RUN.value(address) in one.mirror.kvs for one in (a, b)))
        await store.txn([], [Delete(RUN.value(address))])
        await until(lambda: Round.from_kv(b.mirror.kvs[RUN.round]).restored)
        # Those who have met train on.
        assert not any(client.get().wait_list for client in clients)
        assert clients[1].agent.filler(address) is not None
        await until(lambda: bool(clients[1].get().wait_list))
        await clients[1].leave()
        await until(lambda: bool(clients[0].get().wait_list))
