# SPDX-License-Identifier: Apache-2.0
"""The contract of every driver that has a network: what a broken one looks like to the caller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

import pytest

from rdzv.errors import (
    Compacted,
    ConfigError,
    StoreAmbiguous,
    StoreUnavailable,
)
from rdzv.store import Compare, Put, Store, WatchBatch
from rdzv.store.etcd.client import EtcdStore
from rdzv.store.etcd.deadlines import ATTEMPT_S
from rdzv.store.etcd.endpoint import STATUS, AnswerLostError, EtcdEndpoint, NotSentError
from rdzv.store.memory.server import EmbeddedServer
from tests.support.clocks.calm import calmly
from tests.support.faults.link import Link
from tests.support.ports import free_ports
from tests.support.store.backend import DRIVERS, Backend, following, real_etcd
from tests.support.store.patient_store import CALL_S, PatientEtcdStore, wait_long
from tests.support.store.tcp_proxy import TcpProxy


class Broken:
    """A client whose every connection goes through a proxy of its own, and one that is fine."""

    def __init__(self, backend: Backend, proxies: list[TcpProxy]) -> None:
        self._backend = backend
        self.proxies, self.fine, self.prefix = proxies, backend.connect(), backend.prefix
        self.store = self._connect()

    async def again(self) -> None:
        """Have a client that has met nothing yet, and proxies that let everything through."""
        await self.store.close()
        for proxy in self.proxies:
            proxy.mend()
        self.store = self._connect()

    def _connect(self) -> Store:
        return self._backend.connect_by([proxy.endpoint for proxy in self.proxies])


@pytest.fixture
async def broken(backend: Backend) -> AsyncIterator[Broken]:
    async with AsyncExitStack() as stack:
        proxies = [
            await stack.enter_async_context(TcpProxy(endpoint)) for endpoint in backend.endpoints
        ]
        made = Broken(backend, proxies)
        yield made
        await made.store.close()


@asynccontextmanager
async def closing(store: Store) -> AsyncIterator[Store]:
    try:
        yield store
    finally:
        await store.close()


over_a_network = pytest.mark.parametrize("backing", ["embedded", *real_etcd], indirect=True)


@over_a_network
async def test_an_answer_that_is_lost_leaves_a_write_ambiguous(broken: Broken) -> None:
    async def lose(attempt: int) -> None:
        await broken.again()
        key = f"{broken.prefix}{attempt}"
        await broken.store.range(key)
        for proxy in broken.proxies:
            proxy.hold(up=False)
        started_s = time.monotonic()
        with pytest.raises(StoreAmbiguous):
            await broken.store.txn([Compare(key, "create", "=", 0)], [Put(key, b"1")])
        assert ATTEMPT_S - 0.1 < time.monotonic() - started_s < ATTEMPT_S + 0.7
        assert [kv.value for kv in (await broken.fine.range(key)).kvs] == [b"1"]
        for proxy in broken.proxies:
            proxy.mend()
        settled = await broken.store.txn(
            [Compare(key, "create", "=", 0)], [Put(key, b"2")], timeout_s=5
        )
        assert not settled.succeeded

    await calmly(lose)


@over_a_network
async def test_a_request_that_is_lost_leaves_a_write_ambiguous_too(broken: Broken) -> None:
    key = broken.prefix + "k"
    await broken.store.range(key)
    for proxy in broken.proxies:
        proxy.hold(down=False)
    with pytest.raises(StoreAmbiguous):
        await broken.store.txn([], [Put(key, b"1")])
    assert (await broken.fine.range(key)).kvs == ()


@over_a_network
async def test_a_connection_cut_under_a_write_leaves_it_ambiguous(broken: Broken) -> None:
    key = broken.prefix + "k"
    await broken.store.range(key)
    for proxy in broken.proxies:
        proxy.hold(up=False)
    # The cut is to make it ambiguous, and not the end of its time.
    wait_long(broken.store)
    start = (await broken.fine.range(key)).revision + 1
    writing = asyncio.create_task(broken.store.txn([], [Put(key, b"1")], timeout_s=CALL_S))
    async with following(broken.fine, key, start) as follower:
        await follower.count(1)
    for proxy in broken.proxies:
        proxy.cut()
    # Sooner than a ping would miss its answer.
    async with asyncio.timeout(5):
        with pytest.raises(StoreAmbiguous):
            await writing


@pytest.mark.parametrize("driver", DRIVERS.values())
async def test_a_store_that_is_not_there_applied_nothing(driver: type[EtcdStore]) -> None:
    async def ask(_: int) -> None:
        endpoints = [f"127.0.0.1:{port}" for port in await asyncio.to_thread(free_ports, 2)]
        async with closing(driver(endpoints)) as store:
            started_s = time.monotonic()
            with pytest.raises(StoreUnavailable, match="refused"):
                await store.txn([], [Put("k", b"1")], timeout_s=0.5)
            with pytest.raises(StoreUnavailable):
                await store.range("k", timeout_s=0.5)
            with pytest.raises(StoreUnavailable):
                await store.lease_keep_alive(1, timeout_s=0.5)
            assert time.monotonic() - started_s < 2.5

    await calmly(ask)


@over_a_network
async def test_a_connection_that_does_not_come_about_sent_nothing(broken: Broken) -> None:
    for proxy in broken.proxies:
        proxy.hold()
    with pytest.raises(StoreUnavailable):
        await broken.store.txn([], [Put(broken.prefix + "k", b"1")], timeout_s=1.2)
    for proxy in broken.proxies:
        proxy.mend()
    wait_long(broken.store)
    await broken.store.txn([], [Put(broken.prefix + "k", b"2")], timeout_s=CALL_S)
    kvs = (await broken.fine.range(broken.prefix + "k")).kvs
    assert [(kv.value, kv.version) for kv in kvs] == [(b"2", 1)]


@over_a_network
async def test_reads_and_renewals_find_an_endpoint_that_answers(
    broken: Broken, backend: Backend
) -> None:
    async def find(_: int) -> None:
        broken.proxies[0].mend()
        # The first endpoint will be frozen; of the embedded server there is only one.
        fine = backend.connect_by([broken.proxies[0].endpoint, *backend.endpoints[-1:]])
        async with closing(fine):
            lease = next(backend.lease_ids)
            await fine.lease_grant(lease, 10)
            broken.proxies[0].hold()
            started_s = time.monotonic()
            assert await fine.lease_keep_alive(lease) >= 10
            await fine.range(broken.prefix, prefix=True)
            assert time.monotonic() - started_s < ATTEMPT_S + 0.7
            started_s = time.monotonic()
            await fine.txn([], [Put(broken.prefix + "k", b"")])
            assert time.monotonic() - started_s < 0.5
            await fine.lease_revoke(lease)

    await calmly(find)


@over_a_network
async def test_a_late_answer_on_a_slow_line_is_waited_for(backend: Backend) -> None:
    async def wait(attempt: int) -> None:
        key = f"{backend.prefix}{attempt}"
        async with AsyncExitStack() as stack:
            links = [
                await stack.enter_async_context(Link(endpoint, Random(0)))
                for endpoint in backend.endpoints
            ]
            store = backend.connect_by([link.endpoint for link in links])
            stack.push_async_callback(store.close)
            for link in links:
                link.slow(0.15, 0, 0)
            await store.range(key)
            await store.range(key)
            for link in links:
                link.slow(0.6, 0, 0)
            # Given up after 1 s, it would be ambiguous, and the next one begin with a new
            # connection.
            assert (await store.txn([Compare(key, "create", "=", 0)], [Put(key, b"")])).succeeded

    await calmly(wait)


@over_a_network
async def test_a_watch_survives_cuts_and_holes(broken: Broken) -> None:
    start = (await broken.fine.range(broken.prefix)).revision + 1
    written: list[int] = []
    async with following(broken.store, broken.prefix, start) as follower:

        async def write(count: int) -> None:
            for _ in range(count):
                result = await broken.fine.txn([], [Put(broken.prefix + "k", b"")])
                written.append(result.revision)

        await write(5)
        await follower.count(5)
        for proxy in broken.proxies:
            proxy.cut()
        await write(5)
        for proxy in broken.proxies:
            proxy.mend()
        await follower.count(10)
        for proxy in broken.proxies:
            proxy.hold()
        await write(5)
        with pytest.raises(StoreUnavailable):
            await broken.store.range(broken.prefix)
        for proxy in broken.proxies:
            proxy.mend()
        await write(5)
        await follower.count(20, deadline_s=30)
    assert [event.kv.mod_revision for event in follower.events] == written


@over_a_network
async def test_close_ends_calls_that_wait(broken: Broken) -> None:
    async def close(_: int) -> None:
        await broken.again()
        key = broken.prefix + "k"
        await broken.store.range(key)
        for proxy in broken.proxies:
            proxy.hold()
        reading = asyncio.create_task(broken.store.range(key, timeout_s=60))
        writing = asyncio.create_task(broken.store.txn([], [Put(key, b"")], timeout_s=60))
        await asyncio.sleep(0.2)
        # Less than what is left of their attempts, which end by themselves.
        async with asyncio.timeout(0.5):
            await broken.store.close()
            with pytest.raises(StoreUnavailable):
                await reading
            with pytest.raises(StoreAmbiguous):
                await writing

    await calmly(close)


@over_a_network
async def test_close_does_not_wait_for_connections_given_up(
    broken: Broken, backend: Backend
) -> None:
    async def close(_: int) -> None:
        broken.proxies[0].mend()
        async with closing(backend.connect_by([broken.proxies[0].endpoint])) as store:
            await store.range(broken.prefix)
            broken.proxies[0].hold()
            with pytest.raises(StoreUnavailable):
                await store.range(broken.prefix, timeout_s=ATTEMPT_S + 0.05)
            async with asyncio.timeout(0.5):
                await store.close()

    await calmly(close)


@over_a_network
async def test_a_call_on_a_retired_connection_is_ambiguous_and_cancels_nobody(
    broken: Broken,
) -> None:
    key = broken.prefix + "k"
    await broken.store.range(key)
    assert isinstance(broken.store, EtcdStore)
    endpoint = broken.store._calls.rotation.current
    for proxy in broken.proxies:
        proxy.hold()
    asking = asyncio.create_task(endpoint.call(STATUS, STATUS.request(), timeout_s=30))
    await asyncio.sleep(0.2)
    endpoint.reconnect(0.1)
    async with asyncio.timeout(20):
        with pytest.raises(AnswerLostError):
            await asking
    assert not asking.cancelled()


async def test_a_call_that_waits_for_a_connection_waits_for_the_one_that_replaces_it() -> None:
    async with EmbeddedServer() as server, TcpProxy(server.endpoint) as proxy:
        endpoint = EtcdEndpoint(proxy.endpoint)
        proxy.hold()
        asking = asyncio.create_task(endpoint.call(STATUS, STATUS.request(), timeout_s=2))
        await asyncio.sleep(0.2)
        # The old connection comes about after all, the new one does not.
        first = (proxy._up, proxy._down)
        proxy._up, proxy._down = asyncio.Event(), asyncio.Event()
        endpoint.reconnect()
        for flow in first:
            flow.set()
        with pytest.raises(NotSentError, match="no connection"):
            await asking
        await endpoint.close()


@over_a_network
async def test_close_ends_a_call_that_was_not_sent_yet(broken: Broken) -> None:
    async def close(_: int) -> None:
        await broken.again()
        for proxy in broken.proxies:
            proxy.hold()
        writing = asyncio.create_task(broken.store.txn([], [Put("k", b"")], timeout_s=60))
        await asyncio.sleep(0.2)
        async with asyncio.timeout(0.5):
            await broken.store.close()
            with pytest.raises(StoreUnavailable):
                await writing

    await calmly(close)


async def drain(batches: AsyncIterator[WatchBatch]) -> None:
    async for _ in batches:
        pass


@pytest.mark.parametrize("driver", DRIVERS.values())
async def test_a_store_that_lost_its_memory_is_noticed(driver: type[EtcdStore]) -> None:
    (port,) = await asyncio.to_thread(free_ports, 1)
    listen = f"127.0.0.1:{port}"
    store = driver([listen])
    async with EmbeddedServer(listen):
        for _ in range(10):
            last = await store.txn([], [Put("k", b"")])
        batches = store.watch("k", last.revision + 1)
        await anext(batches)
    async with EmbeddedServer(listen):
        other = PatientEtcdStore([listen])
        # It has come further than the old one did: only its identity gives it away.
        for _ in range(20):
            await other.txn([], [Put("k", b"")])
        async with asyncio.timeout(30):
            with pytest.raises(Compacted, match="emptied or restored"):
                await drain(batches)
        await other.close()
    await store.close()


@pytest.mark.parametrize(
    "endpoint",
    ["", "host", "host:", "ftp://host:2379", "http://host:2379/path", "a:b:1", "::1:2379"],
)
async def test_an_endpoint_that_is_none_is_named(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="MUSTER_ETCD_ENDPOINTS"):
        EtcdStore([endpoint])
    with pytest.raises(ConfigError, match="at least one"):
        EtcdStore([])


async def test_two_servers_cannot_share_a_port() -> None:
    async with EmbeddedServer() as server:
        with pytest.raises(ConfigError, match="cannot listen"):
            async with EmbeddedServer(server.endpoint):
                pass
