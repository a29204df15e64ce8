# SPDX-License-Identifier: Apache-2.0
"""Recovery of a client that writes, watches and holds leases, after the leader is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from time import monotonic

from benchmarks.etcd_members import EtcdMembers, etcd_members
from rdzv.errors import LeaseLost, StoreError
from rdzv.store import Put, Store
from rdzv.store.etcd.client import EtcdStore

WRITE_EVERY_S = 0.02
LEASES = 4
LEASE_TTL_S = 10
RENEW_EVERY_S = LEASE_TTL_S / 3

CALM_S = 2.0
"""Time before a kill, and after everything has recovered."""

_lease_ids = count(1 << 40)


@dataclass(frozen=True, slots=True)
class Recovery:
    """One kill: time of the election, longest gap of writes and of events, and leases lost."""

    election_s: float
    write_gap_s: float
    watch_gap_s: float
    leases_lost: int


@dataclass
class _Load:
    """The load of one client, with the times of its successes."""

    store: Store
    prefix: str
    written_s: list[float] = field(default_factory=list)
    heard_s: list[float] = field(default_factory=list)
    leases_lost: int = 0

    async def run(self) -> None:
        start = (await self.store.range(self.prefix)).revision + 1
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(start))
            tasks.create_task(self._write())
            for _ in range(LEASES):
                tasks.create_task(self._renew(next(_lease_ids)))

    async def _write(self) -> None:
        while True:
            try:
                await self.store.txn([], [Put(self.prefix + "k", b"x")])
            except StoreError:
                continue
            self.written_s.append(monotonic())
            await asyncio.sleep(WRITE_EVERY_S)

    async def _watch(self, start: int) -> None:
        async for batch in self.store.watch(self.prefix, start):
            if batch.events:
                self.heard_s.append(monotonic())

    async def _renew(self, lease_id: int) -> None:
        await self.store.lease_grant(lease_id, LEASE_TTL_S)
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            try:
                await self.store.lease_keep_alive(lease_id)
            except LeaseLost:
                self.leases_lost += 1
                return
            except StoreError:
                continue


async def recoveries(kills: int) -> dict[str, list[Recovery]]:
    """Kill the leader ``kills`` times under each driver, in turns."""
    from rdzv.store.etcd3.driver import Etcd3Store

    drivers: dict[str, Callable[[list[str]], Store]] = {
        "http2": EtcdStore,
        "etcd3": Etcd3Store,
    }
    found: dict[str, list[Recovery]] = {name: [] for name in drivers}
    async with etcd_members(3) as members:
        for number in range(kills):
            for name, driver in drivers.items():
                found[name].append(await _one(members, driver, f"/bench/{name}/{number}/"))
    return found


async def _one(members: EtcdMembers, driver: Callable[[list[str]], Store], prefix: str) -> Recovery:
    leader = await members.leader()
    # The client starts with the leader: the worst of the three endpoints.
    endpoints = members.endpoints[leader:] + members.endpoints[:leader]
    async with _load(driver(endpoints), prefix) as load:
        await asyncio.sleep(CALM_S)
        killed_s = monotonic()
        await members.kill(leader)
        await members.leader(other_than=leader)
        election_s = monotonic() - killed_s
        # Longer than a lease lasts without a renewal.
        await asyncio.sleep(LEASE_TTL_S + CALM_S)
    await members.start(leader)
    await members.leader()
    return Recovery(election_s, _gap_s(load.written_s), _gap_s(load.heard_s), load.leases_lost)


@asynccontextmanager
async def _load(store: Store, prefix: str) -> AsyncIterator[_Load]:
    load = _Load(store, prefix)
    running = asyncio.create_task(load.run())
    try:
        yield load
        if running.done():
            running.result()
    finally:
        running.cancel()
        await asyncio.wait({running})
        await store.close()


def _gap_s(moments_s: list[float]) -> float:
    return max(late - early for early, late in pairwise(moments_s))
