# SPDX-License-Identifier: Apache-2.0
"""What is the etcd3 driver's own: the package makes the calls, and its bad habits stay out.

That it keeps the contract of every driver, and how it fares when etcd breaks, stands elsewhere.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from rdzv.errors import ConfigError, StoreRefused, StoreUnavailable
from rdzv.store import Compare, Delete, Put, Range
from rdzv.store.access import Access
from rdzv.store.embedded import EmbeddedServer
from rdzv.store.etcd3_driver import THREADS, Etcd3Store
from rdzv.store.etcd3_package import Etcd3Client
from rdzv.store.etcd3_watch import UNREAD, Etcd3Watch
from rdzv.store.opening import open_store
from tests.chaos.etcd_cluster import EtcdCluster
from tests.chaos.tcp_proxy import TcpProxy
from tests.ports import free_ports

IDLE_S = 3.0
BUSY_SHARE = 0.25
"""The package's own watcher takes 0.6 of a core while etcd is away."""


async def test_the_package_makes_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[str] = Counter()

    def count(name: str) -> Callable[..., Any]:
        method = getattr(Etcd3Client, name)

        def counted(*args: Any, **options: Any) -> Any:
            made[name] += 1
            return method(*args, **options)

        return counted

    calls = ("get_response", "get_range_response", "transaction", "lease", "refresh_lease")
    for name in (*calls, "revoke_lease", "compact", "add_watch_callback"):
        monkeypatch.setattr(Etcd3Client, name, count(name))
    async with EmbeddedServer() as server:
        store = Etcd3Store([server.endpoint])
        await store.lease_grant(7, 60)
        compares = [Compare("k", "lease", "=", 0), Compare("k", "create", "=", 0)]
        written = await store.txn(compares, [Put("k", b"v", 7), Range("k"), Delete("other")])
        assert written.succeeded
        assert [kv.lease for kv in (await store.range("k", prefix=True)).kvs] == [7]
        assert await store.lease_keep_alive(7) >= 60
        async with aclosing(store.watch("k", written.revision)) as batches:
            assert [event.kv.value for event in (await anext(batches)).events] == [b"v"]
        await store.lease_revoke(7)
        await store.compact(written.revision)
        await store.close()
    # The driver proves an endpoint by one read before it watches there.
    assert made == Counter(
        dict.fromkeys((*calls, "revoke_lease", "compact", "add_watch_callback"), 1)
    )


async def test_a_driver_whose_package_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "etcd3"]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("rdzv.store.etcd3_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "etcd3", None)
    with pytest.raises(ConfigError, match=r"MUSTER_STORE_DRIVER.*pip install .*\[etcd3\]"):
        open_store(Access(("127.0.0.1:2379",), driver="etcd3"))


async def test_close_gives_every_thread_back() -> None:
    async def work(store: Etcd3Store) -> None:
        await asyncio.gather(
            *(store.range(f"k{number}", timeout_s=20) for number in range(4 * THREADS))
        )
        start = (await store.range("k")).revision + 1
        async with aclosing(store.watch("k", start)) as batches:
            await store.txn([], [Put("k", b"v")])
            await anext(batches)

    async with EmbeddedServer() as server:
        before = set(threading.enumerate())
        for _ in range(5):
            store = Etcd3Store([server.endpoint])
            await work(store)
            await store.close()
        # Those of the loop's own pool stay until the loop is closed.
        left = [thread for thread in threading.enumerate() if thread not in before]
        left = [thread for thread in left if not thread.name.startswith("asyncio")]
        for thread in left:
            await asyncio.to_thread(thread.join, 5)
        assert [thread.name for thread in left if thread.is_alive()] == []


async def test_calls_have_their_deadline_though_every_thread_is_busy() -> None:
    async with EmbeddedServer() as server, TcpProxy(server.endpoint) as proxy:
        store = Etcd3Store([proxy.endpoint])
        await store.range("k")
        proxy.hold()
        began_s = time.monotonic()
        calls = (store.range(f"k{number}", timeout_s=1.0) for number in range(12 * THREADS))
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(error, StoreUnavailable) for error in found)
        assert time.monotonic() - began_s < 10.0
        await store.close()


async def test_busy_threads_are_no_fault_of_the_endpoint_and_hold_no_lease_up() -> None:
    async with EmbeddedServer() as one, EmbeddedServer() as other:
        store = Etcd3Store([one.endpoint, other.endpoint])
        await store.range("k")
        await store.lease_grant(7, 10)
        used = store._calls.rotation.current
        kicks: list[str] = []
        used._on_kick.add(kicks.append)
        free = threading.Event()
        for _ in range(THREADS):
            store._threads.submit(free.wait, 30)
        try:
            with pytest.raises(StoreUnavailable, match="no thread was free"):
                await store.range("k", timeout_s=1.5)
            assert store._calls.rotation.current is used
            assert kicks == []
            async with asyncio.timeout(5):
                assert await store.lease_keep_alive(7) == 10
        finally:
            free.set()
            await store.close()


async def test_a_watch_does_not_spin_while_etcd_is_away() -> None:
    (port,) = await asyncio.to_thread(free_ports, 1)
    listen = f"127.0.0.1:{port}"
    store = Etcd3Store([listen])
    async with EmbeddedServer(listen):
        written = await store.txn([], [Put("k", b"v")])
        batches = store.watch("k", written.revision)
        await anext(batches)
    waiting = asyncio.create_task(anext(batches, None))
    began_s = time.process_time()
    await asyncio.wait({waiting}, timeout=IDLE_S)
    spent_s = time.process_time() - began_s
    assert not waiting.done()
    await store.close()
    assert await waiting is None
    assert spent_s < BUSY_SHARE * IDLE_S


async def test_a_reader_that_is_slow_holds_the_stream_back(monkeypatch: pytest.MonkeyPatch) -> None:
    told = 0
    tell = Etcd3Watch._tell

    def counted(self: Etcd3Watch, message: Any) -> None:
        nonlocal told
        told += 1
        tell(self, message)

    monkeypatch.setattr(Etcd3Watch, "_tell", counted)
    async with EmbeddedServer() as server:
        store, writer = Etcd3Store([server.endpoint]), Etcd3Store([server.endpoint])
        start = (await writer.range("k")).revision + 1
        async with aclosing(store.watch("k", start)) as batches:
            written = [await writer.txn([], [Put("k", b"")]) for _ in range(3 * UNREAD)]
            seen = list((await anext(batches)).events)
            await asyncio.gather(*(writer.range("k", timeout_s=20) for _ in range(50)))
            written += [await writer.txn([], [Put("k", b"")]) for _ in range(3 * UNREAD)]
            assert told < 3 * UNREAD
            while len(seen) < len(written):
                seen += (await anext(batches)).events
        assert [event.kv.mod_revision for event in seen] == [each.revision for each in written]
        await store.close()
        await writer.close()


@pytest.mark.etcd
async def test_more_operations_than_etcd_takes_are_refused(etcd_cluster: EtcdCluster) -> None:
    store = Etcd3Store(etcd_cluster.endpoints)
    with pytest.raises(StoreRefused, match="too many operations"):
        await store.txn([], [Put(f"/many/{number}", b"") for number in range(200)])
    assert (await store.range("/many/", prefix=True)).kvs == ()
    await store.close()
