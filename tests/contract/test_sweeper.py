# SPDX-License-Identifier: Apache-2.0
"""The sweep of what gone pods have left: who does it, and what it spares."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

import pytest

from agent.upkeep import Sweeper
from launcher_shim.c10d.rounds.records import Round
from launcher_shim.c10d.rounds.stages import SHARED_RUN
from rdzv.job import JobClient
from rdzv.members.gone import KEPT_MIN
from rdzv.reconcile import Kernel
from rdzv.records.drain import Drain
from rdzv.records.history import HistoryEntry
from rdzv.records.job import Incarnation, Job, Member
from rdzv.records.policy import JobPolicy
from rdzv.store import Put, TxnResult
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.clocks.virtual import now
from tests.support.sidecars.jobs import KEYS, client
from tests.support.sidecars.processes import until
from tests.support.store.cut import Cut
from tests.support.store.transacting import Carry, TransactingStore, Transaction
from tests.support.tasks import beside

pytestmark = pytest.mark.virtual

HERE = KEYS.in_generation(1)


def member(name: str, incarnation: int) -> Member:
    return Member(name, f"uid-{name}", incarnation, "10.0.0.1", "", "worker", 1, 1, 4)


async def fill(one: JobClient, gone: int) -> None:
    """A job of two, and the names of ``gone`` pods."""
    await one.store.txn(
        [],
        [
            Put(KEYS.job, Job(JobPolicy(1, 4)).to_json()),
            *(Put(HERE.member(n), member(n, i).to_json()) for i, n in enumerate("ab", 1)),
            *(Put(KEYS.incarnation(n), Incarnation(n, 1, f"uid-{n}").to_json()) for n in "ab"),
        ],
    )
    for number in range(gone):
        name = f"gone-{number:04}"
        record = Incarnation(name, 1, f"uid-{name}").to_json()
        written = await one.store.txn([], [Put(KEYS.incarnation(name), record)])
    await one.mirror.reached(written.revision)


@asynccontextmanager
async def sweeping(
    one: JobClient, me: str, store: MemoryStore | None = None, *, pod_uid: str | None = None
) -> AsyncIterator[None]:
    sweeper = Sweeper(
        Kernel(replace(one, store=store or one.store), tuple, asyncio.Event().wait, now, Random(1)),
        *(me, pod_uid or f"uid-{me}"),
        pause_s=0.02,
    )
    async with beside(sweeper.run()):
        yield


async def names(one: JobClient, wanted: int) -> set[str]:
    """The names in the store, once there are so many."""
    while len(found := one.mirror.under(KEYS.incarnations)) != wanted:
        await one.mirror.changed_after(one.mirror.sequence)
    return {kv.key for kv in found}


async def test_the_oldest_listed_member_drops_the_oldest_names() -> None:
    async with client(MemoryEngine(now)) as one:
        await fill(one, KEPT_MIN + 120)
        async with sweeping(one, "a"):
            left = await names(one, KEPT_MIN + 2)
    assert {KEYS.incarnation("a"), KEYS.incarnation("b")} <= left
    assert KEYS.incarnation("gone-0119") not in left
    assert KEYS.incarnation("gone-0120") in left


async def test_the_oldest_drains_of_gone_pods_go_with_them() -> None:
    async with client(MemoryEngine(now)) as one:
        await fill(one, 1)
        for number in range(KEPT_MIN + 3):
            drain = Drain(f"uid-{number:04}", "gone", "test", "prestop", outcome="expired")
            written = await one.store.txn([], [Put(HERE.drain(drain.pod_uid), drain.to_json())])
        await one.mirror.reached(written.revision)
        async with sweeping(one, "a"):
            while len(left := one.membership.snapshot().drains) != KEPT_MIN:
                await one.mirror.changed_after(one.mirror.sequence)
        assert "uid-0002" not in left
        assert "uid-0003" in left


@pytest.mark.parametrize(("me", "pod_uid"), [("b", "uid-b"), ("a", "uid-of-a-fenced-pod")])
async def test_nobody_else_does(me: str, pod_uid: str) -> None:
    engine = MemoryEngine(now)
    async with client(engine) as one:
        await fill(one, KEPT_MIN + 1)
        before = engine.revision
        async with sweeping(one, me, pod_uid=pod_uid):
            for number in range(3):
                await one.store.txn([], [Put(HERE.drain(f"uid-{number}"), b"{}")])
                await asyncio.sleep(0.05)
        assert engine.revision == before + 3


class Raced(TransactingStore):
    """Somebody takes the oldest name again, just before it is dropped."""

    raced = False

    async def transact(self, asked: Transaction, carry: Carry) -> TxnResult:
        if not self.raced:
            self.raced = True
            back = Incarnation("gone-0000", 9, "uid-new").to_json()
            await carry(Transaction([], [Put(KEYS.incarnation("gone-0000"), back)]))
        return await carry(asked)


async def test_a_name_that_is_taken_meanwhile_is_spared() -> None:
    engine = MemoryEngine(now)
    async with client(engine) as one:
        await fill(one, KEPT_MIN + 1)
        async with sweeping(one, "a", Raced(engine)):
            left = await names(one, KEPT_MIN + 2)
    assert KEYS.incarnation("gone-0000") in left
    assert [n for n in range(201) if KEYS.incarnation(f"gone-{n:04}") not in left] == [1]


async def test_what_workers_of_former_worlds_left_goes_whole() -> None:
    async with client(MemoryEngine(now)) as one:
        await fill(one, 1)
        shared, run = HERE.run(SHARED_RUN), HERE.run("digits")
        old = [shared.value(b"/worker/attempt_0/key"), shared.addend(b"init/", "w-0.1")]
        mine = shared.value(b"/mine")
        for key in (*old, mine):
            await one.store.txn([], [Put(key, b"1")])
        for number in range(2):
            details: dict[str, object] = {"run_id": "digits", "round": number}
            entry = HistoryEntry("round", "a", "", 1.0, details)
            key = KEYS.history_entry(number, "a", "round")
            await one.store.txn([], [Put(key, entry.to_json())])
        written = await one.store.txn([], [Put(run.round, Round(1, complete=True).to_json())])
        await one.mirror.reached(written.revision)
        async with sweeping(one, "a"):
            while set(old) & set(one.mirror.kvs):
                await one.mirror.changed_after(one.mirror.sequence)
        assert mine in one.mirror.kvs


async def test_a_store_that_is_away_delays_it(caplog: pytest.LogCaptureFixture) -> None:
    engine, cut = MemoryEngine(now), Cut()
    async with client(engine) as one:
        await fill(one, KEPT_MIN + 1)
        cut.cut()
        with caplog.at_level("INFO"):
            async with sweeping(one, "a", MemoryStore(engine, faults=cut)):
                await until(lambda: "sweeper: retrying a write" in caplog.text)
                cut.mend()
                await one.store.txn([], [Put(HERE.drain("uid-x"), b"{}")])
                await names(one, KEPT_MIN + 2)
