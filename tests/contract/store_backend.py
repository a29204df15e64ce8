# SPDX-License-Identifier: Apache-2.0
"""One store behind the driver under test, and clients of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

import pytest

from rdzv.store import Store, WatchBatch, WatchEvent
from rdzv.store.embedded import EmbeddedServer
from rdzv.store.etcd import EtcdStore
from rdzv.store.memory import MemoryEngine, MemoryStore
from tests.chaos.etcd_cluster import EtcdCluster

_numbers = itertools.count(1)


class Backend:
    """Makes clients of one store; each test has a prefix of its own."""

    def __init__(self, connect: Callable[[], Store], endpoints: Sequence[str]) -> None:
        self._connect = connect
        self.endpoints = endpoints
        self.prefix = f"/contract/{next(_numbers)}/"
        self.lease_ids = itertools.count(next(_numbers) << 32)
        self._clients: list[Store] = []

    def connect(self) -> Store:
        client = self._connect()
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


class Following:
    """Collects what a watch delivers; ``until`` waits for it with a deadline."""

    def __init__(self, batches: AsyncIterator[WatchBatch]) -> None:
        self._batches = batches
        self.batches: list[WatchBatch] = []

    @property
    def events(self) -> list[WatchEvent]:
        return [event for batch in self.batches for event in batch.events]

    def seen(self) -> list[tuple[str, str, bytes]]:
        return [(event.kind, event.kv.key, event.kv.value) for event in self.events]

    async def until(self, condition: Callable[[], bool], deadline_s: float = 5.0) -> None:
        async with asyncio.timeout(deadline_s):
            while not condition():
                self.batches.append(await anext(self._batches))

    async def count(self, events: int, deadline_s: float = 5.0) -> None:
        await self.until(lambda: len(self.events) >= events, deadline_s)


@asynccontextmanager
async def following(store: Store, prefix: str, start_revision: int) -> AsyncIterator[Following]:
    batches = store.watch(prefix, start_revision)
    async with aclosing(batches):
        yield Following(batches)


@pytest.fixture(
    params=["memory", "embedded", pytest.param("etcd", marks=pytest.mark.etcd)], name="backing"
)
def _backing(request: pytest.FixtureRequest) -> str | EtcdCluster:
    """Sync, so that real members start outside the event loop."""
    if request.param == "etcd":
        cluster = request.getfixturevalue("etcd_cluster")
        assert isinstance(cluster, EtcdCluster)
        return cluster
    return str(request.param)


@pytest.fixture
async def backend(backing: str | EtcdCluster) -> AsyncIterator[Backend]:
    if backing == "memory":
        engine = MemoryEngine()
        made = Backend(lambda: MemoryStore(engine), [])
        yield made
        await made.close()
    elif backing == "embedded":
        async with EmbeddedServer() as server:
            made = Backend(lambda: EtcdStore([server.endpoint]), [server.endpoint])
            yield made
            await made.close()
    else:
        assert isinstance(backing, EtcdCluster)
        endpoints = backing.endpoints
        first = itertools.count()
        made = Backend(lambda: EtcdStore(endpoints, first=next(first)), endpoints)
        yield made
        await made.close()


@pytest.fixture
async def store(backend: Backend) -> Store:
    return backend.connect()
