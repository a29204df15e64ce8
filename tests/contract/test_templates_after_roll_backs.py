# SPDX-License-Identifier: Apache-2.0
"""A roll-out that was taken back, where the last pods of both templates overlap."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from agent.parts import MemberParts, member_parts
from agent.surroundings import MemberSettings
from rdzv.job import JobClient
from rdzv.members.registration import Identity
from rdzv.records.history import HistoryEntry
from rdzv.store import Compare, Operation, Put, TxnResult
from rdzv.store.memory.client import MemoryEngine
from tests.support.clocks.virtual import now
from tests.support.records import by_policy
from tests.support.sidecars.jobs import KEYS, client, identity, surroundings
from tests.support.sidecars.registrars import LONG_TTL_S, TTL_S, registered, until
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


async def test_the_former_template_is_back_when_the_last_newer_pod_has_gone() -> None:
    async with (
        client(MemoryEngine(now)) as one,
        pod(one, identity("a")),
        AsyncExitStack() as roll_back,
        AsyncExitStack() as roll_out,
    ):
        await roll_out.enter_async_context(pod(one, newer("new"), LONG_TTL_S))
        await roll_back.enter_async_context(pod(one, identity("b")))
        assert most(one) == 8
        await roll_out.aclose()
        gone_s = now()
        await until(one, lambda s: s.job is not None and s.job.policy.max_nodes == 4)
        assert now() - gone_s >= 3 * TTL_S
        entries = [HistoryEntry.from_kv(kv) for kv in one.mirror.under(KEYS.history)]
        said = [(entry.member, entry.why) for entry in entries if entry.what == "set"]
        told = "no member with the newer template is left: max is 4 (before: 8)"
        assert said[1:] == [("b", told)]


async def test_a_lost_lease_takes_no_roll_out_back() -> None:
    async with (
        client(MemoryEngine(now)) as one,
        pod(one, identity("a")),
        pod(one, newer("new")) as new,
    ):
        first = new.registrar.held
        assert new.registrar.lease_id is not None
        await one.store.lease_revoke(new.registrar.lease_id)
        await until(one, lambda s: "new" not in s.members)
        await until(one, lambda s: "new" in s.members)
        assert new.registrar.held != first
        await asyncio.sleep(10 * TTL_S)
        assert most(one) == 8


async def test_who_comes_back_in_time_keeps_the_newer_template_in_force() -> None:
    async with client(MemoryEngine(now)) as one, pod(one, identity("a")):
        async with pod(one, newer("new")):
            pass
        await until(one, lambda s: "new" not in s.members)
        await asyncio.sleep(2 * TTL_S)
        async with pod(one, newer("again")):
            await asyncio.sleep(10 * TTL_S)
            assert most(one) == 8


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
