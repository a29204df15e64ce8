# SPDX-License-Identifier: Apache-2.0
"""Registering that fails, or does not last: few writes, one lease, and a word about it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from itertools import pairwise

import pytest

from rdzv.errors import StoreAmbiguous, StoreError, StoreFull, StoreRefused, StoreUnavailable
from rdzv.members.registration import Held
from rdzv.store import Put
from rdzv.store.memory.client import Faults, MemoryEngine, MemoryStore
from tests.support.clocks.virtual import now
from tests.support.sidecars.jobs import KEYS, client, identity
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

pytestmark = pytest.mark.virtual

AGAIN = "is another sidecar running under the same pod UID, or is the store too slow"
"""What is asked of who reads the log when registrations do not last."""


class Refusing(Faults):
    """Refuses the calls named in ``errors``; writes down when each call was made."""

    def __init__(self, **errors: StoreError) -> None:
        self.errors = errors
        self.calls: Counter[str] = Counter()
        self.at_s: list[float] = []

    async def before(self, call: str) -> None:
        self.calls[call] += 1
        if call == "lease_keep_alive":
            self.at_s.append(now())
        if call in self.errors:
            raise self.errors[call]


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
    faults = Refusing(txn=StoreRefused("etcdserver: permission denied"))
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
    faults = Refusing(txn=StoreRefused("etcdserver: permission denied"))
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
    faults = Refusing(txn=StoreRefused("etcdserver: permission denied"))
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
