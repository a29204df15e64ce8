# SPDX-License-Identifier: Apache-2.0
"""What launchers store lands only under their sidecar's registration, by every driver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any

import pytest

from launcher_shim.c10d import clean_up
from launcher_shim.c10d.rounds.stages import SHARED_RUN
from launcher_shim.tcpstore import wire
from rdzv.keys import JobKeys
from rdzv.records.job import Job
from rdzv.store import Compare, KeyValue, Operation, Put, Store, TxnResult
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.histories.pods import pod
from tests.support.sidecars.endpoints import Pod
from tests.support.sidecars.jobs import begin_next_life
from tests.support.sidecars.processes import until
from tests.support.sidecars.raw_client import DEADLINE_S, RawClient, connected
from tests.support.store.backend import Backend

TTL_S = 600.0
"""No lease is to end by itself here."""

_jobs = count()

WRITES: tuple[wire.Request, ...] = (
    wire.Set(b"/set", b"late"),
    wire.MultiSet(((b"/set", b"late"), (b"/other", b"late"))),
    wire.CompareSet(b"/set", b"before", b"late"),
    wire.Append(b"/set", b"late"),
    wire.Add(b"/sum", 1),
    wire.Barrier(b"/barrier", 1),
    wire.DeleteKey(b"/set"),
    wire.QueuePush(b"/queue", b"late"),
    wire.QueuePop(b"/queue"),
)
"""Every request that changes something, given what ``before`` has stored."""


class HeldBack:
    """A store client whose launchers' writes are on their way until ``passing`` is set."""

    def __init__(self, store: Store) -> None:
        self.passing = asyncio.Event()
        self.passing.set()
        self._under_way = 0
        self._send = store.txn
        store.txn = self._txn  # type: ignore[method-assign]

    async def _txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        **options: Any,
    ) -> TxnResult:
        if any(isinstance(one, Put) and "/ops/" in one.key for one in then):
            self._under_way += 1
            await self.passing.wait()
            self._under_way -= 1
        return await self._send(compares, then, otherwise, **options)

    async def under_way(self, writes: int) -> None:
        """Wait until so many are."""
        await until(lambda: self._under_way == writes)


def job() -> JobKeys:
    """One that no other test has, in a store that they share."""
    return JobKeys("fenced", f"job-{next(_jobs)}")


async def stored(one: Pod, keys: JobKeys) -> tuple[KeyValue, ...]:
    runs = keys.in_generation(1).runs
    return (await one.client.store.range(runs, prefix=True, timeout_s=DEADLINE_S)).kvs


async def before(client: RawClient) -> None:
    await client.ask(wire.Set(b"/set", b"before"))
    await client.ask(wire.QueuePush(b"/queue", b"before"))
    assert await client.ask(wire.Add(b"/sum", 40)) == 40


@asynccontextmanager
async def writing(port: int) -> AsyncIterator[list[asyncio.Task[bytes]]]:
    """A client for each request that writes: it has sent it, and waits for the answer."""
    async with AsyncExitStack() as stack:
        answers = []
        for request in WRITES:
            client = await stack.enter_async_context(connected(port))
            client.send(request)
            answers.append(asyncio.create_task(client.byte()))
        try:
            yield answers
        finally:
            for answer in answers:
                answer.cancel()
            await asyncio.gather(*answers, return_exceptions=True)


async def test_i6_nothing_is_stored_for_a_launcher_whose_sidecar_is_superseded(
    backend: Backend,
) -> None:
    keys, store = job(), backend.connect()
    held_back = HeldBack(store)
    async with pod(store, keys, "w-0", TTL_S) as old, connected(old.port) as first:
        await before(first)
        held_back.passing.clear()
        async with writing(old.port) as answers:
            # Some read before they write, which a sidecar that is superseded no longer does.
            await held_back.under_way(len(WRITES))
            async with pod(backend.connect(), keys, "w-0", TTL_S, uid="of-the-next-pod") as new:

                async def cleaned_up() -> bool:
                    return not any("/ops/" in kv.key for kv in await stored(new, keys))

                await until(cleaned_up)
                found = await stored(new, keys)
                assert len(found) == 3
                held_back.passing.set()
                await until(lambda: not old.registrar.registered.is_set())
                answered, _ = await asyncio.wait(answers, timeout=0.5)
                assert await stored(new, keys) == found
                assert not answered


async def test_the_log_says_why_the_records_of_a_fenced_sidecars_clients_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(clean_up, "CLEAN_UP_S", 0.1)
    caplog.set_level("INFO", logger=clean_up.__name__)
    keys, engine = job(), MemoryEngine()
    async with (
        pod(MemoryStore(engine), keys, "w-0", TTL_S) as old,
        pod(MemoryStore(engine), keys, "w-0", TTL_S, uid="of-the-next-pod"),
    ):
        await until(lambda: not old.registrar.registered.is_set())
        async with connected(old.port) as client:
            client.send(wire.Add(b"/n", 1))
            client.send(wire.Ping(7))
        said = "of a closed connection: the member is not registered"
        await until(lambda: said in caplog.text)
        assert not old.endpoint.connections


async def test_i5_what_a_launcher_writes_without_a_registration_is_stored_once_it_is_back(
    backend: Backend,
) -> None:
    keys, store = job(), backend.connect()
    held_back = HeldBack(store)
    async with (
        pod(store, keys, "w-0", TTL_S) as one,
        connected(one.port) as first,
        connected(one.port) as second,
    ):
        await before(first)
        held_back.passing.clear()
        first.send(wire.Add(b"/sum", 2))
        second.send(wire.Append(b"/set", b" and after"))
        await held_back.under_way(2)
        lease = one.registrar.lease_id
        assert lease is not None
        await backend.connect().lease_revoke(lease, timeout_s=DEADLINE_S)
        held_back.passing.set()
        async with asyncio.timeout(DEADLINE_S):
            assert await first.number() == 42
        assert one.registrar.lease_id != lease
        assert await second.ask(wire.Get(b"/set")) == b"before and after"


@pytest.mark.parametrize("run_id", ["digits", None])
async def test_i5_what_is_under_way_when_the_job_begins_its_next_life_is_stored_there(
    run_id: str | None,
) -> None:
    keys, store = job(), MemoryStore()
    held_back = HeldBack(store)
    async with pod(store, keys, "w-0", TTL_S) as one, connected(one.port) as client:
        if run_id is not None:
            await client.open_rendezvous(run_id)
        await before(client)
        held_back.passing.clear()
        client.send(wire.Add(b"/sum", 2))
        await held_back.under_way(1)
        now = Job.from_kv((await store.range(keys.job, timeout_s=DEADLINE_S)).kvs[0])
        await begin_next_life(store, keys, now)
        held_back.passing.set()
        async with asyncio.timeout(DEADLINE_S):
            assert await client.number() == 2
        assert await client.ask(wire.Get(b"/sum")) == b"2"
        run = keys.in_generation(2).run(run_id or SHARED_RUN)
        found = (await store.range(run.sums, prefix=True, timeout_s=DEADLINE_S)).kvs
        assert [kv.value for kv in found] == [b"2"]


async def next_life(one: Pod, keys: JobKeys) -> None:
    """Have the job begin its next life, and wait until this sidecar serves it."""
    now = Job.from_kv((await one.client.store.range(keys.job, timeout_s=DEADLINE_S)).kvs[0])
    former = one.endpoint.sessions.shared
    await begin_next_life(one.client.store, keys, now)
    await until(lambda: one.endpoint.sessions.shared is not former)


@pytest.mark.parametrize("run_id", ["digits", None])
async def test_i5_a_wait_and_a_barrier_under_way_go_on_in_the_jobs_next_life(
    run_id: str | None,
) -> None:
    """The barrier counts from nothing there."""
    keys = job()
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(pod(MemoryStore(), keys, "w-0", TTL_S))
        waits, comes, other = [
            await stack.enter_async_context(connected(one.port)) for _ in range(3)
        ]
        if run_id is not None:
            for client in (waits, comes, other):
                await client.open_rendezvous(run_id)
        waits.send(wire.Wait((b"/k",)))
        assert await waits.ask(wire.Add(b"/n", 1)) == 1
        comes.send(wire.Barrier(b"/b", 2))

        async def counted() -> bool:
            return await other.ask(wire.Get(b"/b")) == b"1"

        await until(counted)
        await next_life(one, keys)
        await other.ask(wire.Set(b"/k", b"v"))
        other.send(wire.Barrier(b"/b", 2))
        async with asyncio.timeout(DEADLINE_S):
            for client in (waits, comes, other):
                assert await client.byte() == wire.STOP_WAITING


async def test_nothing_is_dropped_from_a_life_of_the_job_that_is_over() -> None:
    keys, engine = job(), MemoryEngine()
    async with pod(MemoryStore(engine), keys, "w-0", TTL_S) as one:
        former = await one.endpoint.sessions.ready()
        await next_life(one, keys)
        one.endpoint.sessions.forget(former, "w-0.gone")
        # It has given up.
        await until(lambda: "forget w-0.gone" not in {t.get_name() for t in asyncio.all_tasks()})
