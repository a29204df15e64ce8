# SPDX-License-Identifier: Apache-2.0
"""Registering for real, against the memory store: leases, losses, takeovers, goodbyes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rdzv.errors import Fenced
from rdzv.members.registration import Held, Identity
from rdzv.records.drain import Drain, Outcome
from rdzv.records.job import HISTORY_LENGTH, HistoryEntry
from rdzv.store import Delete, Put
from rdzv.store.memory.client import Faults, MemoryEngine, MemoryStore
from tests.support.clocks.virtual import now
from tests.support.records import by_policy
from tests.support.sidecars.jobs import KEYS, LosesOne, NoRoom, client, identity
from tests.support.sidecars.processes import until as until_holds
from tests.support.sidecars.registrars import (
    LONG_TTL_S,
    TTL_S,
    member_of,
    registered,
    registrar,
    running,
    until,
)
from tests.support.store.cut import Cut

pytestmark = pytest.mark.virtual


class DrainedJustThen(Faults):
    """The pod ``old`` is told to go while a transaction is on its way."""

    def __init__(self, engine: MemoryEngine) -> None:
        self._store = MemoryStore(engine)
        self.told = False

    async def before(self, call: str) -> None:
        if call == "txn" and not self.told:
            self.told = True
            await self.drained("")

    async def drained(self, outcome: Outcome) -> None:
        drain = Drain("old", "w-0", "spot", "sigterm", 60.0, 2.0, outcome=outcome)
        await self._store.txn([], [Put(KEYS.in_generation(1).drain("old"), drain.to_json())])


async def test_i7_a_name_is_not_taken_over_from_a_pod_that_was_told_to_go_just_before() -> None:
    engine = MemoryEngine(now)
    faults = DrainedJustThen(engine)
    async with client(engine) as one, client(engine, faults) as two:
        old, new = registrar(one, identity("w-0", "old")), registrar(two, identity("w-0", "new"))
        async with running(old) as old_task:
            await registered(old)
            async with running(new):
                await asyncio.sleep(10 * TTL_S)
                assert faults.told
                assert not new.registered.is_set()
                assert not old_task.done()
                assert "which drains: waiting" in new.trouble
                await faults.drained("committed")
                await registered(new)
                with pytest.raises(Fenced, match="pod new"):
                    await old_task


def of_job(name: str, job_uid: str) -> Identity:
    return replace(identity(name), job_uid=job_uid)


@pytest.mark.parametrize("job_uid", ["", "of a Job"])
async def test_a_pod_of_another_kind_waits_until_the_job_of_that_name_has_ended(
    job_uid: str,
) -> None:
    of_set = replace(identity("bert-0"), owner="StatefulSet.apps")
    other = replace(identity("bert-x"), owner="Deployment.apps", job_uid=job_uid)
    async with client(MemoryEngine(now)) as one:
        second = registrar(one, other, lease_ttl_s=LONG_TTL_S)
        async with member_of(one, of_set, lease_ttl_s=LONG_TTL_S) as first:
            with pytest.raises(Fenced, match=r"the job is of a StatefulSet\.apps"):
                await second.run()
            again = asyncio.create_task(second.let_in_again())
            await asyncio.sleep(10 * LONG_TTL_S)
            assert not again.done()
            assert {*one.membership.snapshot().members} == {"bert-0"}
        await first.leave(timeout_s=5)
        await again
        async with running(second):
            await registered(second)
            assert second.generation == 2


async def test_who_was_fenced_comes_back_when_the_job_is_its_own_again() -> None:
    async with client(MemoryEngine(now)) as one:
        member = registrar(one, of_job("w-0", "mine"), lease_ttl_s=LONG_TTL_S)
        async with running(member) as task:
            await registered(member)
            mine = one.membership.snapshot().job
            assert mine is not None
            # As a sidecar of an earlier version does, which knows of no former life.
            theirs = replace(mine, uid="another", generation=2)
            await one.store.txn([], [Put(KEYS.job, theirs.to_json())])
            with pytest.raises(Fenced, match="UID another"):
                await task
        back = asyncio.create_task(member.let_in_again())
        await one.store.txn([], [Put(KEYS.job, replace(theirs, desired=3).to_json())])
        await until(one, lambda s: s.job is not None and s.job.desired == 3)
        assert not back.done()
        await one.store.txn([], [Put(KEYS.job, replace(mine, generation=3).to_json())])
        await back
        async with running(member):
            await registered(member)
            assert member.generation == 3


async def test_a_store_that_was_emptied_is_seeded_again_with_the_held_generation() -> None:
    async with client(MemoryEngine(now)) as one, member_of(one, held=Held(4, 70)) as member:
        assert member.generation == 4
        assert member.held is not None
        assert member.held.incarnation > 70


async def test_a_store_that_lost_its_data_says_what_was_set_by_hand() -> None:
    async with client(MemoryEngine(now)) as one, member_of(one) as member:
        job = one.membership.snapshot().job
        assert job is not None
        most = job.policy.max_nodes
        await one.store.txn([], [Put(KEYS.job, by_policy(job, max_nodes=most - 1).to_json())])
        await until(one, lambda s: s.job is not None and s.job.policy.max_nodes == most - 1)
        await asyncio.sleep(TTL_S)  # changes in quick succession are seen as one
        before = member.held
        await one.store.txn([], [Delete(KEYS.job)])
        await until(one, lambda s: s.job is not None and member.held != before)
        reasons = [HistoryEntry.from_kv(kv).why for kv in one.mirror.under(KEYS.history)]
        assert reasons[-1] == (
            "the job was not in the store; what was set by hand is lost with its data:"
            f" max is {most} (before: {most - 1})"
        )


async def test_a_registration_that_took_the_last_room_counts() -> None:
    async with client(MemoryEngine(now), NoRoom(applied=True, times=1)) as one:
        async with member_of(one) as member:
            pass
        assert member.held == Held(1, 1)
        assert len(one.mirror.under(KEYS.history)) == 1


async def test_who_leaves_a_store_without_room_is_gone_at_once() -> None:
    engine = MemoryEngine(now)
    no_room = NoRoom(applied=False, times=0)
    async with client(engine, no_room) as one:
        async with member_of(one) as member:
            pass
        no_room.times = 99
        await member.leave(timeout_s=1)
        key = KEYS.in_generation(1).member("w-0")
        assert (await one.store.range(key)).kvs == ()
        assert list(engine.leases) == []


@pytest.mark.parametrize("what", ["request", "answer"])
async def test_a_goodbye_that_may_be_lost_is_said_again(what: str) -> None:
    engine = MemoryEngine(now)
    faults = LosesOne()
    async with client(engine, faults) as one:
        async with member_of(one, lease_ttl_s=LONG_TTL_S) as member:
            pass
        faults.loses = what
        await member.leave(timeout_s=5)
        await one.mirror.reached(engine.revision)
        assert faults.loses == ""
        assert one.membership.snapshot().members == {}
        job = one.membership.snapshot().job
        assert job is not None
        assert job.vacated
        assert list(engine.leases) == []


async def test_history_is_bounded() -> None:
    async with client(MemoryEngine(now)) as one:
        for n in range(HISTORY_LENGTH + 20):
            async with member_of(one, identity("w-0", f"uid-{n}")):
                pass
        assert len(one.mirror.under(KEYS.history)) <= HISTORY_LENGTH


async def test_a_cut_of_two_thirds_of_a_lease_costs_no_lease() -> None:
    cut = Cut()
    async with client(MemoryEngine(now), cut) as one, member_of(one) as member:
        held, renewed_until_s = member.held, member.lease_valid_until_s
        # The cut begins just after a renewal.
        await until_holds(lambda: member.lease_valid_until_s != renewed_until_s)
        cut.cut()
        await asyncio.sleep(0.7 * TTL_S)
        cut.mend()
        await asyncio.sleep(0.75 * TTL_S)
        assert member.held == held
