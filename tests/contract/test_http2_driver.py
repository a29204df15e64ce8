# SPDX-License-Identifier: Apache-2.0
"""What is the driver ``http2``'s own: no library of gRPC, no thread, and what it knows was sent.

That it keeps the contract of every driver, and how it fares when etcd breaks, stands elsewhere.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import threading
import time
from contextlib import aclosing, suppress

import pytest

from rdzv.errors import StoreUnavailable
from rdzv.store import Delete, Put
from rdzv.store.access import Access
from rdzv.store.etcd.client import EtcdStore
from rdzv.store.etcd.endpoint import STATUS, TXN, NotSentError
from rdzv.store.etcd.errors import StatusCode, StatusError
from rdzv.store.etcd.http2_endpoint import Http2Endpoint
from rdzv.store.etcd.messages import txn_request
from rdzv.store.http2 import connecting
from rdzv.store.memory.server import EmbeddedServer
from rdzv.store.open import open_store
from tests.support.ports import free_ports
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.http2_peer import Played
from tests.support.store.patient_store import CALL_S, PatientEtcdStore
from tests.support.store.tcp_proxy import TcpProxy

WITHOUT_GRPC = """
import asyncio, sys, threading
from agent import process
from rdzv.store.access import Access
from rdzv.store.open import open_store

async def main():
    store = open_store(Access((sys.argv[1],), driver="http2"))
    await store.range("k", timeout_s=60)
    print(sorted(name for name in sys.modules if name.partition(".")[0] == "grpc"))
    print(threading.active_count())
    await store.close()

asyncio.run(main())
"""


async def test_a_sidecar_with_it_has_neither_grpc_nor_threads() -> None:
    async with EmbeddedServer() as server:
        command = [sys.executable, "-c", WITHOUT_GRPC, server.endpoint]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=CALL_S, check=True
        )
    assert done.stdout.split("\n")[:2] == ["[]", "1"]


async def test_open_store_makes_it() -> None:
    store = open_store(Access(("127.0.0.1:2379",), driver="http2"))
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

            monkeypatch.setattr(connecting, "resolve", addresses)
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
        store = open_store(Access((f"127.0.0.1:{port}",), driver="http2"))
        with pytest.raises(StoreUnavailable, match="HTTP/2"):
            await store.range("k")
        await store.close()


@pytest.mark.etcd
async def test_closing_leaves_no_task_and_no_thread(etcd_cluster: EtcdCluster) -> None:
    before = set(threading.enumerate())
    tasks = asyncio.all_tasks()
    for _ in range(5):
        store = PatientEtcdStore(etcd_cluster.endpoints)
        await asyncio.gather(*(store.range(f"k{number}") for number in range(64)))
        await store.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == tasks
    assert set(threading.enumerate()) == before


def test_the_codes_are_grpc_s() -> None:
    grpc = pytest.importorskip("grpc")
    assert {one.name: one.value for one in StatusCode} == {
        one.name: one.value[0] for one in grpc.StatusCode
    }
