# SPDX-License-Identifier: Apache-2.0
"""Registering that fails, does not last, or is one of many: few writes, one lease, and a word."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import AsyncExitStack
from itertools import pairwise

import pytest

from rdzv.errors import StoreAmbiguous, StoreError, StoreFull, StoreRefused, StoreUnavailable
from rdzv.job import JobClient
from rdzv.members.lease import RENEWALS_PER_TTL
from rdzv.members.registration import Held
from rdzv.membership import REST_PER_MEMBER_S, Membership
from rdzv.mirror import Mirror
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.store import KeyValue, Put, WatchEvent
from rdzv.store.memory.client import Faults, MemoryEngine, MemoryStore
from tests.support.clocks.virtual import now
from tests.support.records import kv
from tests.support.records import member as record
from tests.support.sidecars.jobs import KEYS, client, identity, loaded
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
from tests.support.tasks import beside

pytestmark = pytest.mark.virtual

AGAIN = "is another sidecar running under the same pod UID, or is the store too slow"
"""What is asked of who reads the log when registrations do not last."""


class Refusing(Faults):
    """Refuses the calls named in ``errors``, and writes down when each was made.

    The watch delivers nothing while it is not on a ``level``.
    """

    def __init__(self, **errors: StoreError) -> None:
        self.errors = errors
        self.calls: Counter[str] = Counter()
        self.at_s: list[float] = []
        self.level = asyncio.Event()
        self.level.set()

    async def before(self, call: str) -> None:
        self.calls[call] += 1
        if call == "lease_keep_alive":
            self.at_s.append(now())
        if call in self.errors:
            raise self.errors[call]

    async def delivering(self) -> None:
        await self.level.wait()


REFUSED = StoreRefused("etcdserver: permission denied")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


async def until_asked(caplog: pytest.LogCaptureFixture) -> None:
    """Wait until the log asks why registrations do not last."""
    await until_holds(lambda: any(AGAIN in sentence for sentence in warnings(caplog)))


async def lasting(tasks: list[asyncio.Task[None]], seconds: float) -> None:
    """Let time pass in which none of ``tasks`` may end."""
    done, _ = await asyncio.wait(tasks, timeout=seconds)
    assert not done


async def test_a_store_that_refuses_costs_one_lease_and_ever_fewer_attempts() -> None:
    faults = Refusing(txn=REFUSED)
    engine = MemoryEngine(now)
    async with client(engine, faults) as one:
        member = registrar(one, identity("w-0"))
        async with running(member) as task:
            await lasting([task], 1.5 * TTL_S)
            assert 2 <= faults.calls["txn"] <= 6
            assert faults.calls["lease_grant"] == 1
            assert len(list(engine.leases)) == 1
            del faults.errors["txn"]
            # The pause never grows beyond a lease time.
            async with asyncio.timeout(1.5 * TTL_S):
                await registered(member)


@pytest.mark.parametrize("error", [StoreFull("no space"), StoreAmbiguous("no answer")])
async def test_what_others_write_does_not_shorten_the_pauses(error: StoreError) -> None:
    engine = MemoryEngine(now)
    faults = Refusing(txn=error)
    async with client(engine, faults) as one:
        others = MemoryStore(engine)

        async def write() -> None:
            while True:
                await others.txn([], [Put(KEYS.prefix + "busy", b"")])
                await one.mirror.reached(engine.revision)
                await asyncio.sleep(0.001)

        async with running(registrar(one, identity("w-0"))) as task:
            writing = asyncio.create_task(write())
            await lasting([task, writing], TTL_S)
            assert 2 <= faults.calls["txn"] <= 5
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)


async def test_a_lease_has_its_whole_time_when_what_was_refused_is_written() -> None:
    engine = MemoryEngine(now)
    faults = Refusing(txn=REFUSED)
    async with client(engine, faults) as one:
        member = registrar(one, identity("w-0"), lease_ttl_s=LONG_TTL_S)
        async with running(member):
            await until_holds(lambda: faults.calls["txn"] >= 2)
            assert faults.calls["txn"] == 2
            del faults.errors["txn"]
            await registered(member)
            assert member.lease_id is not None
            lives_s = engine.leases[member.lease_id].deadline_s - engine.clock()
            assert member.lease_valid_until_s - now() <= lives_s + 0.001
            # The lease was granted for the first attempt, at least 0.9 s before this one.
            assert lives_s > LONG_TTL_S - 0.8
    assert faults.calls["lease_grant"] == 1


async def test_a_lease_that_ended_between_two_attempts_is_granted_again() -> None:
    engine = MemoryEngine(now)
    faults = Refusing(txn=REFUSED)
    async with client(engine, faults) as one:
        member = registrar(one, identity("w-0"))
        async with running(member):
            await until_holds(lambda: faults.calls["txn"] == 1)
            (lease_id,) = engine.leases
            engine.revoke(lease_id)
            del faults.errors["txn"]
            await registered(member)
            assert list(engine.leases) == [member.lease_id]


async def test_two_sidecars_of_one_pod_uid_come_to_rest_and_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = MemoryEngine(now)
    async with client(engine) as one, client(engine) as two:
        twins = [registrar(one, identity("w-0")), registrar(two, identity("w-0"), seed=1)]
        async with running(twins[0]) as first, running(twins[1]) as second:
            await lasting([first, second], TTL_S)
            # Each registration is a revision, and so is the end of the lease that it replaces.
            assert engine.revision < 30
            await until_asked(caplog)
            asked = next(sentence for sentence in warnings(caplog) if AGAIN in sentence)
            assert asked.startswith("registered 2 times within ")
            assert f"for leases of {TTL_S:g} s?" in asked


async def test_leases_that_run_out_unrenewed_are_told(caplog: pytest.LogCaptureFixture) -> None:
    faults = Refusing(lease_keep_alive=StoreUnavailable("etcdserver: request timed out"))
    async with client(MemoryEngine(now), faults) as one, running(registrar(one, identity("w-0"))):
        await until_asked(caplog)
        assert "the member record is gone: registering again" in warnings(caplog)


async def test_a_lease_that_is_lost_once_is_back_at_once_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with client(MemoryEngine(now)) as one:
        async with member_of(one, lease_ttl_s=LONG_TTL_S) as member:
            assert member.held is not None
            assert member.lease_id is not None
            first = member.held.incarnation
            await one.store.lease_revoke(member.lease_id)
            await until(
                one,
                lambda s: "w-0" in s.members and s.members["w-0"].incarnation > first,
                timeout_s=2,
            )
            assert member.held == Held(1, one.membership.snapshot().members["w-0"].incarnation)
        assert [s for s in warnings(caplog) if s.endswith(": registering again")]
        assert not [s for s in warnings(caplog) if AGAIN in s]


async def test_who_registered_together_does_not_renew_in_step() -> None:
    faults = Refusing()
    async with (
        client(MemoryEngine(now), faults) as one,
        running(registrar(one, identity("w-0"))) as task,
    ):
        await until_holds(lambda: len(faults.at_s) >= 6)
        assert not task.done()
    pauses_s = [later - former for former, later in pairwise(faults.at_s)]
    assert len(pauses_s) >= 4
    assert max(pauses_s) - min(pauses_s) > 0.01 * TTL_S
    assert min(pauses_s) > 0.29 * TTL_S


async def test_a_disk_that_hangs_costs_neither_lease_nor_registration(
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults = Refusing()
    kept: list[Held] = []

    async def hang(held: Held) -> None:
        kept.append(held)
        await asyncio.Event().wait()

    async with (
        client(MemoryEngine(now), faults) as one,
        member_of(one, on_held=hang) as member,
    ):
        # It has outlived its lease.
        await until_holds(lambda: faults.calls["lease_keep_alive"] >= 5)
        assert member.registered.is_set()
        assert kept == [member.held]
        record = await one.store.range(KEYS.in_generation(1).member("w-0"))
        assert [kv.lease for kv in record.kvs] == [member.lease_id]
    (sentence,) = warnings(caplog)
    assert "was not kept within" in sentence


async def test_a_mirror_that_is_behind_costs_no_registration() -> None:
    faults = Refusing()
    store = MemoryStore(MemoryEngine(now), faults=faults)
    async with loaded(JobClient.of(store, KEYS, clock=now)) as one:
        faults.level.clear()
        member = registrar(one, identity("w-0"))
        async with running(member):
            # For three times as long as the lease lives by itself.
            await until_holds(lambda: faults.calls["lease_keep_alive"] >= 3 * RENEWALS_PER_TTL)
            assert not member.registered.is_set()
            faults.level.set()
            await registered(member)
            assert faults.calls["txn"] == 1


async def test_many_that_leave_at_once_cost_few_reads() -> None:
    faults, leavers = Refusing(), 40
    async with client(MemoryEngine(now), faults) as one:
        members = [
            registrar(one, identity(f"w-{n:02}"), lease_ttl_s=LONG_TTL_S) for n in range(leavers)
        ]
        async with AsyncExitStack() as stack:
            for member in members:
                await stack.enter_async_context(running(member))
            await registered(*members)
        before = faults.calls["range"]
        await asyncio.gather(*(member.leave(timeout_s=30) for member in members))
        # Were they all to compare with the same one, each departure would fail all others.
        assert faults.calls["range"] - before < 5 * leavers
        await one.mirror.reached((await one.store.range(KEYS.job)).revision)
        snapshot = one.membership.snapshot()
        assert not snapshot.members
        assert snapshot.job is not None
        assert snapshot.job.vacated


REST_S = REST_PER_MEMBER_S * 100
"""The rest of a membership of a hundred between two looks."""


def membership_of_a_hundred() -> tuple[Mirror, Membership]:
    """Nothing follows a store."""
    names = [f"w-{n:03}" for n in range(100)]
    here = KEYS.in_generation(1)
    job = kv(KEYS.job, value=Job(JobPolicy(1, 4)).to_json())
    members = [kv(here.member(name), value=record(name).to_json()) for name in names]
    one = JobClient.of(MemoryStore(MemoryEngine(now)), KEYS, clock=now)
    one.mirror.replace([job, *members], 1)
    assert len(one.membership.snapshot().members) == 100
    return one.mirror, one.membership


def change(mirror: Mirror) -> None:
    revision = mirror.revision + 1
    job = KeyValue(KEYS.job, Job(JobPolicy(1, 4)).to_json(), 1, revision, 2, 0)
    mirror.apply([WatchEvent("put", job)], revision)


async def test_a_change_after_a_calm_is_told_at_once() -> None:
    mirror, membership = membership_of_a_hundred()
    woken = asyncio.create_task(membership.changed_from(membership.snapshot()))
    await asyncio.sleep(REST_S)
    change(mirror)
    await asyncio.wait_for(woken, REST_S)


async def test_the_changes_of_a_storm_are_told_together() -> None:
    mirror, membership = membership_of_a_hundred()
    looks, changes = 0, 200
    last = mirror.revision + changes
    seen_last = asyncio.Event()

    async def look() -> None:
        nonlocal looks
        while not seen_last.is_set():
            snapshot = membership.snapshot()
            looks += 1
            if snapshot.revision == last:
                seen_last.set()
            await membership.changed_from(snapshot)

    async with beside(look()):
        began_s = now()
        for _ in range(changes):
            change(mirror)
            await asyncio.sleep(0.001)
        took_s = now() - began_s
        await seen_last.wait()
    assert looks <= 2 + took_s / REST_S
