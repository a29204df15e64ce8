# SPDX-License-Identifier: Apache-2.0
"""What is the etcd3 driver's own: its package and gRPC's log, and threads that are busy.

That it keeps the contract of every driver, and how it fares when etcd breaks, stands elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from rdzv.errors import ConfigError, StoreUnavailable
from rdzv.store import Compare, Delete, Operation, Put, Range
from rdzv.store.access import Access
from rdzv.store.etcd.client import open_store
from rdzv.store.etcd3.calls import Etcd3Client
from rdzv.store.etcd3.driver import THREADS, Etcd3Store
from rdzv.store.memory.server import EmbeddedServer
from tests.support.sidecars.runs import until
from tests.support.store.patient_store import PatientEtcd3Store
from tests.support.waiting import DEADLINE_S

NO_TLS = """
import os, sys
from rdzv.store.etcd3.calls import WatchStub
import grpc
channel = grpc.secure_channel(sys.argv[1], grpc.ssl_channel_credentials())
try:
    channel.unary_unary("/etcdserverpb.KV/Range")(b"", timeout=5)
except grpc.RpcError as error:
    print(error.code().name)
print(os.environ.get("GRPC_VERBOSITY"))
"""


async def test_the_package_makes_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    # The driver proves an endpoint by one read before it watches there.
    names = (
        *("get_response", "get_range_response", "add_watch_callback", "transaction", "compact"),
        *("lease", "refresh_lease", "revoke_lease"),
    )
    made: Counter[str] = Counter()

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            made[name] += 1
            return method(*args, **options)

        return call

    for name in names:
        monkeypatch.setattr(Etcd3Client, name, counted(name, getattr(Etcd3Client, name)))
    async with EmbeddedServer() as server:
        store = PatientEtcd3Store([server.endpoint])
        await store.lease_grant(7, 60)
        compares = [Compare("k", "lease", "=", 0), Compare("k", "create", "=", 0)]
        operations: list[Operation] = [Put("k", b"v", 7), Range("k"), Delete("other")]
        written = await store.txn(compares, operations)
        assert written.succeeded
        assert [kv.lease for kv in (await store.range("k", prefix=True)).kvs] == [7]
        assert await store.lease_keep_alive(7) >= 60
        async with aclosing(store.watch("k", written.revision)) as batches:
            assert [event.kv.value for event in (await anext(batches)).events] == [b"v"]
        await store.lease_revoke(7)
        await store.compact(written.revision)
        await store.close()
    assert made == Counter(dict.fromkeys(names, 1))


async def test_a_driver_whose_package_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "etcd3"]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("rdzv.store.etcd3.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "etcd3", None)
    with pytest.raises(ConfigError, match=r"MUSTER_STORE_DRIVER.*pip install .*\[etcd3\]"):
        open_store(Access(("127.0.0.1:2379",), driver="etcd3"))


@pytest.mark.parametrize("given", [{}, {"GRPC_VERBOSITY": "ERROR"}], ids=["unset", "set"])
async def test_the_log_of_grpc_is_off_and_a_training_started_from_here_has_it_as_the_user_has(
    given: dict[str, str],
) -> None:
    """What answers is no TLS, of which gRPC's log tells."""
    environ = {key: text for key, text in os.environ.items() if key != "GRPC_VERBOSITY"} | given
    async with EmbeddedServer() as server:
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", NO_TLS, server.endpoint],
            env=environ,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    assert done.stdout == f"UNAVAILABLE\n{given.get('GRPC_VERBOSITY')}\n", done.stderr
    assert given or done.stderr == ""


async def test_busy_threads_are_no_fault_of_the_endpoint_and_hold_no_lease_up() -> None:
    async with EmbeddedServer() as one, EmbeddedServer(engine=one.engine) as other:
        store = Etcd3Store([one.endpoint, other.endpoint])
        await store.range("k", timeout_s=60)
        await store.lease_grant(7, 60, timeout_s=60)
        used = store._calls.rotation.current
        kicks: list[str] = []
        used._on_kick.add(kicks.append)
        free = threading.Event()
        for _ in range(THREADS):
            store._threads.submit(free.wait, DEADLINE_S)
        try:
            with pytest.raises(StoreUnavailable, match="no thread was free"):
                await store.range("k", timeout_s=1.5)
            assert store._calls.rotation.current is used
            assert kicks == []
            async with asyncio.timeout(60):
                assert await store.lease_keep_alive(7, timeout_s=60) == 60
        finally:
            free.set()
            await store.close()


async def test_what_waits_for_a_thread_as_the_client_closes_hears_of_it() -> None:
    async with EmbeddedServer() as server:
        store = Etcd3Store([server.endpoint])
        await store.range("k", timeout_s=60)
        free = threading.Event()
        for _ in range(THREADS):
            store._threads.submit(free.wait, 60)
        try:
            waiting = [
                asyncio.ensure_future(store.range("k", timeout_s=60)),
                asyncio.ensure_future(anext(store.watch("k", 1), None)),
            ]
            await until(lambda: store._threads._work_queue.qsize() == len(waiting), 60)
            await store.close()
            async with asyncio.timeout(60):
                call, watch = await asyncio.gather(*waiting, return_exceptions=True)
            assert isinstance(call, StoreUnavailable)
            assert "this client" in str(call)
            assert watch is None
        finally:
            free.set()
