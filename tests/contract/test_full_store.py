# SPDX-License-Identifier: Apache-2.0
"""Sidecars that start, and start again, while the store refuses all writes for want of space."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agent.running import RunningParts
from agent.surroundings import MemberSettings, Sockets
from rdzv.errors import StoreFull, StoreRefused
from rdzv.members.registration import Held
from rdzv.store.memory.client import Faults, MemoryEngine, MemoryStore
from rdzv.store.memory.engine import NO_SPACE
from tests.support.clocks.virtual import now
from tests.support.sidecars.jobs import KEYS, client, identity, surroundings
from tests.support.sidecars.processes import until
from tests.support.sidecars.registrars import TTL_S, member_of, registered, registrar, running
from tests.support.sidecars.run_dir import MemoryRunDir

pytestmark = pytest.mark.virtual

RECORD = KEYS.in_generation(1).member("w-0")
W_0 = identity("w-0")


class Refusing(Faults):
    """Refuses every transaction with ``error``, if there is one."""

    error: StoreRefused | None = None

    async def before(self, call: str) -> None:
        if call == "txn" and self.error is not None:
            raise self.error


async def first_life(engine: MemoryEngine) -> tuple[Held, int]:
    """Register, and be killed: what was held, and its lease."""
    async with client(engine) as one, member_of(one) as member:
        held, lease_id = member.held, member.lease_id
    assert held is not None
    assert lease_id is not None
    return held, lease_id


def record_of(engine: MemoryEngine) -> tuple[int, int] | None:
    """The lease of the member's record, and its revision; None if there is none."""
    engine.expire_leases()
    return next(
        ((kv.lease, kv.mod_revision) for kv in engine._kvs.values() if kv.key == RECORD), None
    )


async def test_i5_a_restarted_sidecar_renews_its_former_lease_until_a_full_store_has_room() -> None:
    engine = MemoryEngine(now)
    held, lease_id = await first_life(engine)
    before = record_of(engine)
    engine.full = True
    async with client(engine) as one:
        member = registrar(one, W_0, held, seed=1)
        async with running(member) as task:
            await asyncio.sleep(20 * TTL_S)
            assert not task.done()
            assert record_of(engine) == before
            assert member.upheld
            assert not member.registered.is_set()
            engine.full = False
            await registered(member)
            assert not member.upheld
            # Another lease and another incarnation: what the former sidecar sent changes nothing.
            assert member.held is not None
            assert member.held.incarnation > held.incarnation
            now_on = record_of(engine)
            assert now_on is not None
            assert now_on[0] == member.lease_id != lease_id
            # What is not written again yet hangs on the former one, which is left to expire.
            assert lease_id in engine.leases
            await asyncio.sleep(2 * TTL_S)
            engine.expire_leases()
            assert list(engine.leases) == [member.lease_id]


async def test_i6_a_pod_that_takes_a_name_over_renews_no_lease_of_the_one_before() -> None:
    engine = MemoryEngine(now)
    await first_life(engine)
    engine.full = True
    async with client(engine) as one, running(registrar(one, identity("w-0", "uid-new"))):
        await asyncio.sleep(2 * TTL_S)
        assert record_of(engine) is None


@pytest.mark.parametrize("full_first", [False, True])
async def test_a_sidecar_that_is_refused_alone_lets_its_former_lease_end(full_first: bool) -> None:
    # The others go on without it: they have a store, and it cannot act.
    engine = MemoryEngine(now)
    held, _ = await first_life(engine)
    faults = Refusing()
    faults.error = StoreFull("no space") if full_first else StoreRefused("permission denied")
    async with client(engine, faults) as one, running(registrar(one, W_0, held, seed=1)):
        await asyncio.sleep(2 * TTL_S)
        assert (record_of(engine) is not None) == full_first
        faults.error = StoreRefused("permission denied")
        await asyncio.sleep(4 * TTL_S)
        assert record_of(engine) is None


async def test_a_lease_that_ended_before_the_sidecar_was_back_is_not_renewed() -> None:
    engine = MemoryEngine(now)
    held, _ = await first_life(engine)
    engine.full = True
    await asyncio.sleep(2 * TTL_S)
    assert record_of(engine) is None
    async with client(engine) as one:
        member = registrar(one, W_0, held, seed=1)
        async with running(member):
            await asyncio.sleep(4 * TTL_S)
            assert not member.upheld
            engine.full = False
            await registered(member)


@asynccontextmanager
async def sidecar(engine: MemoryEngine, run_dir: MemoryRunDir) -> AsyncIterator[RunningParts]:
    store = MemoryStore(engine)
    settings = MemberSettings(keys=KEYS, identity=W_0, lease_ttl_s=TTL_S)
    around = surroundings(store, "w-0")
    held = run_dir.state(W_0.pod_uid).held
    parts = RunningParts(around, settings, run_dir, Sockets(), held)
    task = asyncio.create_task(parts.run(asyncio.Event()))
    try:
        yield parts
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_restarted_sidecar_is_ready_as_long_as_its_registration_stays() -> None:
    # A kubelet ends one whose start probe fails, and starts it again ever later.
    engine, run_dir = MemoryEngine(now), MemoryRunDir()
    async with sidecar(engine, run_dir) as parts:
        await until(lambda: parts.not_ready() is None)
    engine.full = True
    async with sidecar(engine, run_dir) as parts:
        await until(lambda: parts.not_ready() is None)
        assert not parts.member.registrar.registered.is_set()
        await asyncio.sleep(10 * TTL_S)
        assert parts.not_ready() is None


async def test_a_fresh_pod_that_a_full_store_keeps_out_says_so() -> None:
    engine = MemoryEngine(now)
    engine.full = True
    async with sidecar(engine, MemoryRunDir()) as parts:
        await until(lambda: bool(parts.member.registrar.trouble))
        assert parts.not_ready() == f"not registered yet: {NO_SPACE}"
        engine.full = False
        await until(lambda: parts.not_ready() is None)
