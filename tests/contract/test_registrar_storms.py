# SPDX-License-Identifier: Apache-2.0
"""Registering where much happens at once: a mirror that is behind, many that leave together."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from rdzv.members.lease import RENEWALS_PER_TTL
from rdzv.membership import REST_PER_MEMBER_S, Membership
from rdzv.mirror import Mirror
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.store import KeyValue, WatchEvent
from rdzv.store.memory.client import MemoryEngine
from tests.support.clocks.virtual import now
from tests.support.sidecars.jobs import KEYS, identity
from tests.support.sidecars.registrars import (
    LONG_TTL_S,
    registered,
    registrar,
    running,
)
from tests.support.sidecars.watched_leases import Watched, watched_client

pytestmark = pytest.mark.virtual

LEAVERS = 40
MEMBERS = 100
CHANGES = 200


async def test_a_mirror_that_is_behind_costs_no_registration() -> None:
    faults = Watched()
    async with watched_client(MemoryEngine(now), faults) as one:
        faults.fall_behind()
        member = registrar(one, identity("w-0"))
        async with running(member):
            # For three times as long as the lease lives by itself.
            await faults.until("lease_keep_alive", 3 * RENEWALS_PER_TTL)
            assert not member.registered.is_set()
            assert faults.calls["txn"] == 1
            faults.catch_up()
            await registered(member)
            assert faults.calls["txn"] == 1


async def test_many_that_leave_at_once_cost_few_reads() -> None:
    faults = Watched()
    async with watched_client(MemoryEngine(now), faults) as one:
        members = [
            registrar(one, identity(f"w-{n:02}"), lease_ttl_s=LONG_TTL_S) for n in range(LEAVERS)
        ]
        async with AsyncExitStack() as stack:
            for member in members:
                await stack.enter_async_context(running(member))
            await registered(*members)
        before = faults.calls["range"]
        await asyncio.gather(*(member.leave(timeout_s=30) for member in members))
        # Were they all to compare with the same one, each departure would fail all others.
        assert faults.calls["range"] - before < 5 * LEAVERS
        await one.mirror.reached((await one.store.range(KEYS.job)).revision)
        snapshot = one.membership.snapshot()
        assert not snapshot.members
        assert snapshot.job is not None
        assert snapshot.job.vacated


async def membership_of(members: int) -> tuple[Mirror, Membership]:
    """A membership of that many, and nothing that follows a store."""
    faults = Watched()
    async with watched_client(MemoryEngine(now), faults) as one:
        async with AsyncExitStack() as stack:
            joined = [
                registrar(one, identity(f"w-{n:03}"), lease_ttl_s=LONG_TTL_S)
                for n in range(members)
            ]
            for member in joined:
                await stack.enter_async_context(running(member))
            await registered(*joined)
        # A new one: the other has rested late while they all registered, and remembers by how much.
        return one.mirror, Membership(KEYS, one.mirror)


def change(mirror: Mirror) -> None:
    revision = mirror.revision + 1
    record = Job(JobPolicy(1, 4)).to_json()
    kv = KeyValue(KEYS.job, record, 1, revision, 2, 0)
    mirror.apply([WatchEvent("put", kv)], revision)


async def test_a_change_after_a_calm_is_told_at_once() -> None:
    mirror, membership = await membership_of(MEMBERS)
    rest_s = REST_PER_MEMBER_S * MEMBERS
    woken = asyncio.create_task(membership.changed_from(membership.snapshot()))
    await asyncio.sleep(rest_s)
    change(mirror)
    rest = asyncio.create_task(asyncio.sleep(rest_s))
    await asyncio.wait({woken, rest}, return_when=asyncio.FIRST_COMPLETED)
    assert woken.done()
    await rest


async def test_the_changes_of_a_storm_are_told_together() -> None:
    mirror, membership = await membership_of(MEMBERS)
    looks = 0
    last = mirror.revision + CHANGES
    seen_last = asyncio.Event()

    async def look() -> None:
        nonlocal looks
        while not seen_last.is_set():
            snapshot = membership.snapshot()
            looks += 1
            if snapshot.revision == last:
                seen_last.set()
            await membership.changed_from(snapshot)

    looking = asyncio.create_task(look())
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for _ in range(CHANGES):
        change(mirror)
        await asyncio.sleep(0.001)
    took_s = loop.time() - began_s
    await seen_last.wait()
    looking.cancel()
    assert looks <= 2 + took_s / (REST_PER_MEMBER_S * MEMBERS)
