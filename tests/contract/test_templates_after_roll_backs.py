# SPDX-License-Identifier: Apache-2.0
"""A roll-out that was taken back, where the last pods of both templates overlap."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agent.parts import MemberParts, member_parts
from agent.surroundings import MemberSettings
from rdzv.job import JobClient
from rdzv.members.registration import Identity
from rdzv.store import Compare, Operation, Put, TxnResult
from rdzv.store.memory.client import MemoryEngine
from tests.support.clocks.virtual import now
from tests.support.records import by_policy
from tests.support.sidecars.jobs import KEYS, client, identity, surroundings
from tests.support.sidecars.registrars import TTL_S, registered, until
from tests.support.tasks import beside

pytestmark = pytest.mark.virtual


def newer(name: str) -> Identity:
    return by_policy(identity(name), max_nodes=8)


@asynccontextmanager
async def pod(one: JobClient, who: Identity, ttl_s: float = TTL_S) -> AsyncIterator[MemberParts]:
    settings = MemberSettings(keys=KEYS, identity=who, lease_ttl_s=ttl_s)
    parts = member_parts(surroundings(one.store, who.member), settings, one)
    async with beside(parts.registrar.run(), parts.roll_back.run()):
        await registered(parts.registrar)
        yield parts
    await parts.registrar.leave(timeout_s=5)


def most(one: JobClient) -> int:
    job = one.membership.snapshot().job
    assert job is not None
    return job.policy.max_nodes


async def test_a_store_restored_right_after_a_roll_back_does_not_end_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The revision of the write is then one that the watch may never reach."""
    async with client(MemoryEngine(now)) as one, pod(one, identity("a")):
        applied, lost = one.store.txn, 10**6

        async def txn(
            compares: Sequence[Compare], then: Sequence[Operation], *args: Any, **kwargs: Any
        ) -> TxnResult:
            done = await applied(compares, then, *args, **kwargs)
            rolls_back = any(isinstance(op, Put) and op.key == KEYS.job for op in then)
            return done._replace(revision=done.revision + lost) if rolls_back else done

        for name, template in (("new", 8), ("again", 9)):
            async with pod(one, by_policy(identity(name), max_nodes=template)):
                assert most(one) == template
                monkeypatch.setattr(one.store, "txn", txn)
            await until(one, lambda s: s.job is not None and s.job.policy.max_nodes == 4)
            monkeypatch.undo()
