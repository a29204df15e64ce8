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
from rdzv.records.job import HistoryEntry, Incarnation, Job
from rdzv.records.policy import JobPolicy
from rdzv.store import Put, TxnResult
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.clocks.virtual import now
from tests.support.records import member
from tests.support.sidecars.jobs import KEYS, client
from tests.support.sidecars.processes import until
from tests.support.store.cut import Cut
from tests.support.store.transacting import Carry, TransactingStore, Transaction
from tests.support.tasks import beside

pytestmark = pytest.mark.virtual

HERE = KEYS.in_generation(1)


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


async def swept(one: JobClient, *gone: str) -> set[str]:
    """All keys, once the sweeper has dropped these."""
    while set(gone) & set(one.mirror.kvs):
        await one.mirror.changed_after(one.mirror.sequence)
    return set(one.mirror.kvs)


async def test_the_oldest_listed_member_drops_what_pods_and_worlds_have_left() -> None:
    shared, run = HERE.run(SHARED_RUN), HERE.run("digits")
    of_workers = [shared.value(b"/worker/attempt_0/key"), shared.addend(b"init/", "w-0.1")]
    mine = shared.value(b"/mine")
    drains = [HERE.drain(f"uid-{number:04}") for number in range(KEPT_MIN + 3)]
    async with client(MemoryEngine(now)) as one:
        await fill(one, KEPT_MIN + 120)
        for key in drains:
            uid = key.rpartition("/")[2]
            ended = Drain(uid, "gone", "test", "prestop", outcome="expired")
            await one.store.txn([], [Put(key, ended.to_json())])
        for key in (*of_workers, mine):
            await one.store.txn([], [Put(key, b"1")])
        for number in range(2):
            details: dict[str, object] = {"run_id": "digits", "round": number}
            entry = HistoryEntry("round", "a", "", 1.0, details)
            key = KEYS.history_entry(number, "a", "round")
            await one.store.txn([], [Put(key, entry.to_json())])
        written = await one.store.txn([], [Put(run.round, Round(1, complete=True).to_json())])
        await one.mirror.reached(written.revision)
        async with sweeping(one, "a"):
            gone = [KEYS.incarnation(f"gone-{number:04}") for number in range(120)]
            left = await swept(one, *gone, *drains[:3], *of_workers)
    kept = {KEYS.incarnation(name) for name in ("a", "b", "gone-0120")}
    assert kept | {*drains[3:], mine} <= left


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
            left = await swept(one, KEYS.incarnation("gone-0001"))
    assert [n for n in range(201) if KEYS.incarnation(f"gone-{n:04}") not in left] == [1]


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
                await swept(one, KEYS.incarnation("gone-0000"))
