# SPDX-License-Identifier: Apache-2.0
"""A roll-out that was taken back, where the last pods of both templates overlap."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from agent.parts import member_parts
from agent.surroundings import MemberSettings
from rdzv.job import JobClient
from rdzv.members.registration import Identity
from rdzv.store import Put, TxnResult
from rdzv.store.memory.client import MemoryEngine
from tests.support.clocks.virtual import now
from tests.support.records import by_policy
from tests.support.sidecars.jobs import KEYS, client, identity, surroundings
from tests.support.sidecars.registrars import TTL_S, registered, until
from tests.support.store.transacting import Carry, TransactingStore, Transaction
from tests.support.tasks import beside

pytestmark = pytest.mark.virtual


class Restored(TransactingStore):
    """Restored right after a write of the job's record: the watch is ``behind`` its revision."""

    behind = 0

    async def transact(self, asked: Transaction, carry: Carry) -> TxnResult:
        done = await carry(asked)
        of_job = any(isinstance(one, Put) and one.key == KEYS.job for one in asked.then)
        return done._replace(revision=done.revision + self.behind) if of_job else done


@asynccontextmanager
async def pod(one: JobClient, who: Identity) -> AsyncIterator[None]:
    settings = MemberSettings(keys=KEYS, identity=who, lease_ttl_s=TTL_S)
    parts = member_parts(surroundings(one.store, who.member), settings, one)
    async with beside(parts.registrar.run(), parts.roll_back.run()):
        await registered(parts.registrar)
        yield
    await parts.registrar.leave(timeout_s=5)


async def until_most(one: JobClient, nodes: int) -> None:
    await until(one, lambda s: s.job is not None and s.job.policy.max_nodes == nodes)


async def test_a_store_restored_right_after_a_roll_back_does_not_end_the_next_one() -> None:
    """The revision of the write is then one that the watch may never reach."""
    engine = MemoryEngine(now)
    store = Restored(engine)
    async with client(engine) as read:
        one = replace(read, store=store)
        async with pod(one, identity("a")):
            for name, template in (("new", 8), ("again", 9)):
                async with pod(one, by_policy(identity(name), max_nodes=template)):
                    await until_most(one, template)
                    store.behind = 10**6
                await until_most(one, 4)
                store.behind = 0
