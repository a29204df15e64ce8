# SPDX-License-Identifier: Apache-2.0
"""What torch stores for a round and never deletes does not stay, whoever missed to drop it."""

from __future__ import annotations

import asyncio

import pytest

from launcher_shim.c10d.rounds.records import Round, Seat
from rdzv.records.job import Job, Member
from rdzv.records.policy import JobPolicy
from rdzv.store import Put
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.sidecars.endpoints import pod
from tests.support.sidecars.jobs import KEYS

pytestmark = pytest.mark.virtual

RUN = KEYS.in_generation(1).run("digits")
OTHER = Member("w-1", "uid-1", 1, "10.0.0.1", "", "worker", 1, 1, 4)


def key(number: int, name: str = "MASTER_ADDR") -> str:
    return RUN.value(f"/torch.rendezvous.digits.{number}/{name}".encode())


async def test_every_round_that_is_two_or_more_back_is_dropped() -> None:
    engine = MemoryEngine()
    store = MemoryStore(engine)
    kept = {key(4), key(5), RUN.value(b"/mine")}
    await store.txn(
        [],
        [
            Put(KEYS.job, Job(JobPolicy(1, 4)).to_json()),
            Put(KEYS.in_generation(1).member("w-1"), OTHER.to_json()),
            # Rounds 1 and 2 ended while their first node was away from the store.
            *(Put(one, b"v") for one in (key(1), key(2), key(2, "x/y"), key(3), *kept)),
            Put(RUN.addend(b"/torch.rendezvous.digits.2/num_members", "w-9.1"), b"1 #1"),
            Put(RUN.round, Round(5, True, frozen=(Seat("w-0", "n", 1),)).to_json()),
        ],
    )

    async def there() -> set[str]:
        read = await store.range(RUN.prefix, prefix=True)
        return {kv.key for kv in read.kvs if "/kv/" in kv.key or "/sum/" in kv.key}

    async with pod(engine, "w-0", c10d_port=None) as one, asyncio.timeout(5):
        while await there() != kept:
            await one.client.mirror.changed_after(one.client.mirror.sequence)
