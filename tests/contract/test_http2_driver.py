# SPDX-License-Identifier: Apache-2.0
"""What is the driver ``http2``'s own: no library of gRPC, no thread, and what it knows was sent.

That it keeps the contract of every driver, and how it fares when etcd breaks, stands elsewhere.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
import sys
import time
from contextlib import aclosing, suppress

import pytest

from benchmarks.resident_memory import rss_mib
from rdzv.errors import LeaseLost, StoreUnavailable
from rdzv.store import Delete, Put
from rdzv.store.access import Access
from rdzv.store.etcd import http2_endpoint
from rdzv.store.etcd.answers import StatusCode, StatusError, txn_request
from rdzv.store.etcd.client import EtcdStore, open_store
from rdzv.store.etcd.endpoint import STATUS, TXN, NotSentError
from rdzv.store.etcd.http2_endpoint import Http2Endpoint
from rdzv.store.http2.connection import KEPT_HEADS, Http2Connection
from rdzv.store.http2.engine import Http2Engine
from rdzv.store.http2.frames import KEPT_BLOCKS
from rdzv.store.memory.server import EmbeddedServer
from tests.support.ports import free_ports
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.http2_peer import Played
from tests.support.store.patient_store import CALL_S, PatientEtcdStore
from tests.support.store.tcp_proxy import TcpProxy

DAY, LANES = 2_000_000, 64
"""The calls of a sidecar's day, and so many at a time."""

WITHOUT_GRPC = """
import asyncio, sys, threading
sys.modules["grpc"] = None  # as if it were not installed
from agent import process
from console import main as program
from console.local import job_in_store
from console.store import store as embedded_store
from rdzv.store.access import Access
from rdzv.store.etcd.client import open_store

async def main():
    store = open_store(Access((sys.argv[1],)))
    tasks = asyncio.all_tasks()
    await asyncio.gather(*(store.range(f"k{number}", timeout_s=60) for number in range(64)))
    print(threading.active_count())
    await store.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == tasks

asyncio.run(main())
"""


async def test_the_program_has_no_grpc_and_its_store_no_thread() -> None:
    async with EmbeddedServer() as server:
        command = [sys.executable, "-c", WITHOUT_GRPC, server.endpoint]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=CALL_S, check=True
        )
    assert done.stdout == "1\n"


@pytest.mark.parametrize(
    "access",
    [Access(("127.0.0.1:2379",)), Access(("127.0.0.1:2379",), driver="etcd")],
    ids=["by default", "by its former name"],
)
async def test_open_store_makes_it(access: Access) -> None:
    store = open_store(access)
    assert isinstance(store, EtcdStore)
    assert isinstance(store._calls.rotation.current, Http2Endpoint)
    await store.close()


async def test_an_answer_that_lies_in_the_socket_counts_though_this_process_stood_still() -> None:
    """A process that was stopped may look at its timers before it looks at its sockets."""
    loop = asyncio.get_running_loop()
    connection = Played()
    asking = asyncio.create_task(connection.unary("/store/Call", b"request", 0.2))
    await asyncio.sleep(0)

    def stand_still() -> None:
        until_s = time.monotonic() + 0.5
        while time.monotonic() < until_s:
            pass
        loop.call_later(0.001, connection.answer, 1)

    loop.call_soon(stand_still)
    assert await asking == b"answer"


@pytest.mark.etcd
async def test_large_requests_and_answers_pass_the_windows(etcd_cluster: EtcdCluster) -> None:
    store = PatientEtcdStore(etcd_cluster.endpoints)
    value = bytes(range(256)) * 4000
    for number in range(12):
        await store.txn([], [Put(f"/large/{number:02}", value)])
    found = await store.range("/large/", prefix=True)
    assert [kv.value for kv in found.kvs] == [value] * 12
    async with aclosing(store.watch("/large/", found.revision - 11)) as batches:
        seen: list[bytes] = []
        while len(seen) < 12:
            seen += [event.kv.value for event in (await anext(batches)).events]
    assert seen == [value] * 12
    await store.txn([], [Delete("/large/", prefix=True)])
    await store.close()


async def test_what_waits_for_the_socket_at_its_deadline_was_not_sent() -> None:
    """The line takes nothing more: what had left may be applied, what had not certainly is not."""
    async with EmbeddedServer() as server, TcpProxy(server.endpoint) as proxy:
        endpoint = Http2Endpoint(proxy.endpoint)
        await endpoint.call(STATUS, STATUS.request(), CALL_S)
        proxy.hold()
        value = bytes(60_000)
        writes = [
            endpoint.call(TXN, txn_request([], [Put(f"k{number}", value)], []), 1.0)
            for number in range(400)
        ]
        ends = await asyncio.gather(*writes, return_exceptions=True)
        proxy.mend()
        reader = EtcdStore([server.endpoint])
        unsent = [number for number, end in enumerate(ends) if not isinstance(end, StatusError)]
        sent = [number for number, end in enumerate(ends) if isinstance(end, StatusError)]
        assert unsent
        assert sent
        await asyncio.sleep(1)
        there = {kv.key for kv in (await reader.range("k", prefix=True, timeout_s=CALL_S)).kvs}
        assert not {f"k{number}" for number in unsent} & there
        await reader.close()
        await endpoint.close()


async def test_a_name_with_a_dead_address_is_reached_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first address takes connections and says nothing, the second refuses them."""
    async with EmbeddedServer("127.0.0.1:0") as server:
        port = int(server.endpoint.rpartition(":")[2])
        with socket.socket() as silent:
            silent.bind(("127.0.0.2", port))
            silent.listen()

            async def addresses(host: str, port: int) -> list[str]:
                return ["127.0.0.2", "127.0.0.3", "127.0.0.1"]

            monkeypatch.setattr(http2_endpoint, "resolve", addresses)
            endpoint = Http2Endpoint(f"etcd.example:{port}")
            assert (await endpoint.call(STATUS, STATUS.request(), CALL_S)).version
            await endpoint.close()


async def test_a_watch_on_a_connection_that_was_given_up_a_moment_ago_is_over() -> None:
    async with EmbeddedServer() as server:
        endpoint = Http2Endpoint(server.endpoint)
        await endpoint.call(STATUS, STATUS.request(), CALL_S)
        endpoint.reconnect()
        watch = endpoint.open_watch(lambda reason: None)
        with pytest.raises(StatusError):
            await watch.read()
        assert (await endpoint.call(STATUS, STATUS.request(), CALL_S)).version
        await endpoint.close()


@pytest.mark.parametrize("target", ["127.0.0.1:99999", f"{'x' * 70}.example:1"])
async def test_what_can_be_no_address_is_not_reached(target: str) -> None:
    endpoint = Http2Endpoint(target)
    for _ in range(2):
        with pytest.raises(NotSentError):
            await endpoint.call(STATUS, STATUS.request(), CALL_S)
        await asyncio.sleep(0.2)
    await endpoint.close()


async def test_an_attempt_to_connect_that_outlives_its_callers_fails_in_silence(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rdzv.store.etcd.http2_endpoint.CONNECT_S", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = Http2Endpoint(f"127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(NotSentError, match="no connection within"):
            await endpoint.call(STATUS, STATUS.request(), 0.1)
        await asyncio.sleep(0.5)
        await endpoint.close()
    gc.collect()
    assert caplog.records == []


async def test_what_is_no_store_is_called_so() -> None:
    async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read(10)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

    (port,) = await asyncio.to_thread(free_ports, 1)
    async with await asyncio.start_server(web, "127.0.0.1", port):
        store = open_store(Access((f"127.0.0.1:{port}",)))
        with pytest.raises(StoreUnavailable, match="HTTP/2"):
            await store.range("k")
        await store.close()


@pytest.mark.etcd
@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_a_day_of_calls_on_one_connection_leaves_nothing_behind(
    etcd_cluster: EtcdCluster,
) -> None:
    """Each lane reads, writes a little, and asks for what there is not: that has a text of its own,
    which goes into the table of header fields."""
    store = PatientEtcdStore(etcd_cluster.endpoints[:1])
    await store.txn([], [Put(f"/day/{lane}", b"x" * 100) for lane in range(LANES)])
    connection = current_connection(store)
    rss = [rss_mib(os.getpid())]

    async def lane(number: int) -> None:
        for turn in range(DAY // 10 // LANES):
            if turn % 100 == 1:
                with pytest.raises(LeaseLost):
                    await store.txn([], [Put("/day/none", b"", lease=turn * LANES + number + 1)])
            elif turn % 20 == 0:
                await store.txn([], [Put(f"/day/{number}", b"x" * 100)])
            else:
                await store.range(f"/day/{number}")

    for _ in range(10):
        await asyncio.gather(*map(lane, range(LANES)))
        rss.append(rss_mib(os.getpid()))
    engine = connection._engine
    assert isinstance(engine, Http2Engine)
    assert current_connection(store) is connection
    assert engine._last_id > 2 * (DAY - DAY // 10)
    assert (connection._calls, engine._streams, engine._blocked) == ({}, {}, {})
    assert len(connection._heads) <= KEPT_HEADS
    assert len(engine._decoder._kept) <= KEPT_BLOCKS
    assert engine._decoder._decoder.header_table._current_size <= 4096
    # The first tenth fills what Python keeps for later.
    assert rss[-1] - rss[1] < 1.5, rss
    await store.close()


def current_connection(store: EtcdStore) -> Http2Connection:
    endpoint = store._calls.rotation.current
    assert isinstance(endpoint, Http2Endpoint)
    assert endpoint._current is not None
    return endpoint._current


def test_the_codes_are_grpc_s() -> None:
    grpc = pytest.importorskip("grpc")
    assert {one.name: one.value for one in StatusCode} == {
        one.name: one.value[0] for one in grpc.StatusCode
    }
