# SPDX-License-Identifier: Apache-2.0
"""A helper process of ``store``: one etcd client, which does the same work as every other.

Each client is measured with its defaults. The etcd3 package needs our stubs even to be imported
with a current protobuf, and runs in threads, as it blocks; the others run in tasks of one event
loop of the sidecar's kind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any, Literal

import uvloop

from benchmarks.worker import serve
from rdzv.errors import StoreError
from rdzv.store import Compare, Put
from rdzv.store.etcd.client import EtcdStore

Work = Literal["transactions", "reads"]

VALUE = b"x" * 100
LANES = 64
"""Maximum number of calls in flight, each on a key of its own."""

KEYS = [f"/bench/{lane}" for lane in range(LANES)]


class StoreClient:
    """A ``Store`` with the given driver."""

    def __init__(self, store: EtcdStore) -> None:
        self._store = store

    async def put(self) -> None:
        for key in KEYS:
            await self._store.txn([], [Put(key, VALUE)])

    async def run(self, work: Work, count: int, lanes: int) -> None:
        one = self.transact if work == "transactions" else self._store.range
        await in_lanes(lambda key: insist(one, key), count, lanes)

    async def transact(self, key: str) -> None:
        result = await self._store.txn([Compare(key, "version", ">", 0)], [Put(key, VALUE)])
        assert result.succeeded

    async def close(self) -> None:
        await self._store.close()


class AetcdClient:
    """The aetcd package."""

    def __init__(self, endpoint: str) -> None:
        import aetcd

        host, _, port = endpoint.rpartition(":")
        self._client = aetcd.Client(host, int(port))

    async def put(self) -> None:
        for key in KEYS:
            await self._client.put(key.encode(), VALUE)

    async def run(self, work: Work, count: int, lanes: int) -> None:
        one = self.transact if work == "transactions" else self._read
        await in_lanes(one, count, lanes)

    async def transact(self, key: str) -> None:
        of = self._client.transactions
        name = key.encode()
        succeeded, _ = await self._client.transaction(
            [of.version(name) > 0], [of.put(name, VALUE)], []
        )
        assert succeeded

    async def _read(self, key: str) -> None:
        assert await self._client.get(key.encode()) is not None

    async def close(self) -> None:
        await self._client.close()


class Etcd3Client:
    """The etcd3 package, bare: no deadline, one endpoint, a thread for each call in flight."""

    def __init__(self, endpoint: str) -> None:
        from rdzv.store.etcd3.calls import Etcd3Client as PackageClient

        host, _, port = endpoint.rpartition(":")
        self._client = PackageClient(host, int(port))
        self._threads = ThreadPoolExecutor(LANES)

    async def put(self) -> None:
        # The stubs have no Put call of their own, as Muster never sends one.
        puts = [self._client.transactions.put(key, VALUE) for key in KEYS]
        await asyncio.to_thread(self._client.transaction, [], puts, [])

    async def run(self, work: Work, count: int, lanes: int) -> None:
        one = self.transact if work == "transactions" else self._read
        await asyncio.to_thread(self._in_threads, one, count, lanes)

    def _in_threads(self, one: Callable[[str], None], count: int, lanes: int) -> None:
        def lane(key: str) -> None:
            for _ in repeat(None, count // lanes):
                one(key)

        list(self._threads.map(lane, KEYS[:lanes]))

    def transact(self, key: str) -> None:
        of = self._client.transactions
        succeeded, _ = self._client.transaction([of.version(key) > 0], [of.put(key, VALUE)], [])
        assert succeeded

    def _read(self, key: str) -> None:
        assert self._client.get(key)[0] is not None

    async def close(self) -> None:
        self._client.channel.close()
        self._threads.shutdown()


Client = StoreClient | AetcdClient | Etcd3Client


async def insist(one: Callable[[str], Awaitable[Any]], key: str) -> None:
    """Retry after a timeout: the other clients have none, and wait."""
    while True:
        try:
            await one(key)
            return
        except StoreError:
            continue


async def in_lanes(one: Callable[[str], Awaitable[Any]], count: int, lanes: int) -> None:
    """Call ``one`` ``count`` times, with ``lanes`` calls in flight."""

    async def lane(key: str) -> None:
        for _ in repeat(None, count // lanes):
            await one(key)

    async with asyncio.TaskGroup() as tasks:
        for key in KEYS[:lanes]:
            tasks.create_task(lane(key))


def open_client(name: str, endpoint: str) -> Client:
    match name:
        case "http2":
            return StoreClient(EtcdStore([endpoint]))
        case "etcd3":
            from rdzv.store.etcd3.driver import Etcd3Store

            return StoreClient(Etcd3Store([endpoint]))
        case "the etcd3 package":
            return Etcd3Client(endpoint)
        case "aetcd":
            return AetcdClient(endpoint)
    raise ValueError(f"no such client: {name}")


async def main() -> None:
    client: Client | None = None

    async def obey(order: dict[str, Any]) -> list[float] | None:
        nonlocal client
        if order.pop("do") == "open":
            client = open_client(**order)
            await client.put()
            return None
        assert client is not None
        began_s, cpu_s = time.perf_counter(), time.process_time()
        await client.run(**order)
        return [time.perf_counter() - began_s, time.process_time() - cpu_s]

    await serve(obey)
    if client is not None:
        await client.close()


if __name__ == "__main__":
    uvloop.run(main())
