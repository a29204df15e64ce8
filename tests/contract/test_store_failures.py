# SPDX-License-Identifier: Apache-2.0
"""The contract of every driver that has a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from rdzv.errors import Compacted, ConfigError, StoreAmbiguous, StoreError, StoreUnavailable
from rdzv.pacing import ATTEMPT_S
from rdzv.store import Compare, Put, Store
from rdzv.store.etcd.client import EtcdStore
from rdzv.store.etcd.endpoint import STATUS, AnswerLostError, NotSentError
from rdzv.store.etcd.http2_endpoint import Http2Endpoint
from rdzv.store.memory.client import MemoryStore
from rdzv.store.memory.server import EmbeddedServer
from tests.support.ports import free_ports
from tests.support.store.backend import DRIVERS, Backend, following, real_etcd
from tests.support.store.patient_store import CALL_S, make_patient
from tests.support.store.tcp_proxy import TcpProxy


class Broken:
    """A client whose every connection goes through a proxy of its own, and one that is fine."""

    def __init__(self, backend: Backend, proxies: list[TcpProxy]) -> None:
        self.proxies, self.fine, self.key = proxies, backend.connect(), backend.prefix + "k"
        self.store = backend.connect_by([proxy.endpoint for proxy in self.proxies])

    def hold(self, *, up: bool = True, down: bool = True) -> None:
        for proxy in self.proxies:
            proxy.hold(up=up, down=down)

    def cut(self) -> None:
        for proxy in self.proxies:
            proxy.cut()

    def mend(self) -> None:
        for proxy in self.proxies:
            proxy.mend()


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
@pytest.mark.parametrize(
    ("connected", "up", "told", "applied"),
    [
        pytest.param(True, True, StoreAmbiguous, None, id="the request is lost"),
        pytest.param(True, False, StoreAmbiguous, True, id="the answer is lost"),
        pytest.param(False, True, StoreUnavailable, False, id="no connection comes about"),
    ],
)
async def test_a_call_without_an_answer_in_time_says_whether_it_may_be_applied(
    broken: Broken, *, connected: bool, up: bool, told: type[StoreError], applied: bool | None
) -> None:
    """``up``: requests are held, as answers are. ``applied`` is None if the write may be on its
    way."""
    if connected:
        await broken.store.range(broken.key, timeout_s=CALL_S)
    start = (await broken.fine.range(broken.key)).revision + 1
    broken.hold(up=up)
    create = [Compare(broken.key, "create", "=", 0)]
    async with asyncio.timeout(CALL_S):
        with pytest.raises(told):
            await broken.store.txn(create, [Put(broken.key, b"1")], timeout_s=2.0)
        with pytest.raises(StoreUnavailable):
            await broken.store.range(broken.key, timeout_s=2.0)
        if applied:
            async with following(broken.fine, broken.key, start) as follower:
                await follower.count(1)
        else:
            assert (await broken.fine.range(broken.key)).kvs == ()
        broken.mend()
        settled = await broken.fine.txn(create, [Put(broken.key, b"2")])
    assert applied is None or settled.succeeded != applied


@over_a_network
async def test_a_connection_that_is_cut_leaves_a_write_ambiguous_and_a_read_is_made_again(
    broken: Broken,
) -> None:
    await broken.store.range(broken.key, timeout_s=CALL_S)
    start = (await broken.fine.range(broken.key)).revision + 1
    broken.hold(up=False)
    # The cut is to end the calls, and not their time.
    store = make_patient(broken.store)
    reading = asyncio.create_task(store.range(broken.key, timeout_s=3600))
    writing = asyncio.create_task(store.txn([], [Put(broken.key, b"1")], timeout_s=3600))
    async with asyncio.timeout(CALL_S):
        async with following(broken.fine, broken.key, start) as follower:
            await follower.count(1)
        broken.cut()
        with pytest.raises(StoreAmbiguous):
            await writing
        broken.mend()
        assert [kv.value for kv in (await reading).kvs] == [b"1"]


@over_a_network
@pytest.mark.parametrize("connected", [True, False])
async def test_close_ends_calls_that_wait(broken: Broken, *, connected: bool) -> None:
    if connected:
        await broken.store.range(broken.key, timeout_s=CALL_S)
    broken.hold()
    # They do not end by themselves.
    store = make_patient(broken.store)
    reading = asyncio.create_task(store.range(broken.key, timeout_s=3600))
    writing = asyncio.create_task(store.txn([], [Put(broken.key, b"1")], timeout_s=3600))
    await asyncio.sleep(0.2)
    async with asyncio.timeout(CALL_S):
        await store.close()
        with pytest.raises(StoreUnavailable):
            await reading
        with pytest.raises(StoreAmbiguous if connected else StoreUnavailable):
            await writing
        assert (await broken.fine.range(broken.key)).kvs == ()
        broken.mend()
        settled = await broken.fine.txn(
            [Compare(broken.key, "create", "=", 0)], [Put(broken.key, b"2")]
        )
    assert connected or settled.succeeded


@pytest.mark.parametrize("driver", DRIVERS.values())
async def test_a_store_that_is_not_there_applied_nothing(driver: type[EtcdStore]) -> None:
    endpoints = [f"127.0.0.1:{port}" for port in await asyncio.to_thread(free_ports, 2)]
    async with closing(driver(endpoints)) as store:
        with pytest.raises(StoreUnavailable, match="refused"):
            await store.txn([], [Put("k", b"1")], timeout_s=0.5)
        with pytest.raises(StoreUnavailable):
            await store.range("k", timeout_s=0.5)
        with pytest.raises(StoreUnavailable):
            await store.lease_keep_alive(1, timeout_s=0.5)


@over_a_network
async def test_a_watch_survives_cuts_and_holes(broken: Broken) -> None:
    start = (await broken.fine.range(broken.key)).revision + 1
    written: list[int] = []
    async with following(broken.store, broken.key, start) as follower:

        async def write(count: int) -> None:
            for _ in range(count):
                result = await broken.fine.txn([], [Put(broken.key, b"")])
                written.append(result.revision)

        await write(5)
        await follower.count(5)
        broken.cut()
        await write(5)
        broken.mend()
        await follower.count(10)
        broken.hold()
        await write(5)
        with pytest.raises(StoreUnavailable):
            await broken.store.range(broken.key)
        broken.mend()
        await write(5)
        await follower.count(20)
    assert [event.kv.mod_revision for event in follower.events] == written


@over_a_network
async def test_close_waits_for_no_connection_that_was_given_up(broken: Broken) -> None:
    await broken.store.range(broken.key, timeout_s=CALL_S)
    broken.hold()
    with pytest.raises(StoreUnavailable):
        await broken.store.range(broken.key, timeout_s=ATTEMPT_S + 0.05)
    async with asyncio.timeout(CALL_S):
        await broken.store.close()


@over_a_network
async def test_a_call_on_a_retired_connection_is_ambiguous_and_cancels_nobody(
    broken: Broken,
) -> None:
    await broken.store.range(broken.key, timeout_s=CALL_S)
    endpoint = broken.store._calls.rotation.current
    broken.hold()
    asking = asyncio.create_task(endpoint.call(STATUS, STATUS.request(), timeout_s=60))
    await asyncio.sleep(0.2)
    endpoint.reconnect(0.1)
    async with asyncio.timeout(CALL_S):
        with pytest.raises(AnswerLostError):
            await asking
    assert not asking.cancelled()


async def test_a_call_that_waits_for_a_connection_waits_for_the_one_that_replaces_it() -> None:
    async with EmbeddedServer() as server, TcpProxy(server.endpoint) as proxy:
        endpoint = Http2Endpoint(proxy.endpoint)
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


@pytest.mark.parametrize("driver", DRIVERS.values())
async def test_a_store_that_lost_its_memory_is_noticed(driver: type[EtcdStore]) -> None:
    (port,) = await asyncio.to_thread(free_ports, 1)
    listen = f"127.0.0.1:{port}"
    async with closing(make_patient(driver([listen]))) as store:
        async with EmbeddedServer(listen):
            for _ in range(10):
                last = await store.txn([], [Put("k", b"")], timeout_s=CALL_S)
            batches = store.watch("k", last.revision + 1)
            await anext(batches)
        async with EmbeddedServer(listen) as server:
            # It has come further than the old one did: only its identity gives it away.
            for _ in range(20):
                await MemoryStore(server.engine).txn([], [Put("k", b"")])
            async with asyncio.timeout(CALL_S):
                with pytest.raises(Compacted, match="emptied or restored"):
                    async for _ in batches:
                        pass


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
