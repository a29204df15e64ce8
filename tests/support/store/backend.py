# SPDX-License-Identifier: Apache-2.0
"""One store behind the driver under test, and clients of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from rdzv.keys import ROOT
from rdzv.store import Delete, Store, WatchBatch, WatchEvent
from rdzv.store.access import Access
from rdzv.store.etcd.client import EtcdStore
from rdzv.store.etcd3.driver import Etcd3Store
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from rdzv.store.memory.server import EmbeddedServer
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.patient_store import CALL_S, PatientEtcd3Store, PatientEtcdStore
from tests.support.store.secure import ELECTION, root_access

_numbers = itertools.count(1)


class Backend:
    """Makes clients of one store; each test has a prefix of its own."""

    def __init__(
        self,
        connect: Callable[[], Store],
        access: Access | None = None,
        driver: type[EtcdStore] = EtcdStore,
    ) -> None:
        self._connect = connect
        self._access = access
        self._driver = driver
        self.endpoints = access.targets if access else ()
        self.prefix = f"/contract/{next(_numbers)}/"
        self.lease_ids = itertools.count(next(_numbers) << 32)
        self._clients: list[Store] = []

    def connect(self) -> Store:
        client = self._connect()
        self._clients.append(client)
        return client

    def connect_by(self, targets: Sequence[str]) -> EtcdStore:
        """A client of the driver itself that goes another way; the caller closes it."""
        assert self._access is not None
        scheme = "https://" if self._access.tls else ""
        endpoints = tuple(scheme + target for target in targets)
        return self._driver(replace(self._access, endpoints=endpoints))

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

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(CALL_S):
            while not condition():
                self.batches.append(await anext(self._batches))

    async def batch(self) -> None:
        """Wait for one more batch, which may be but a sign of life."""
        before = len(self.batches)
        await self.until(lambda: len(self.batches) > before)

    async def count(self, events: int) -> None:
        await self.until(lambda: len(self.events) >= events)


@asynccontextmanager
async def following(store: Store, prefix: str, start_revision: int) -> AsyncIterator[Following]:
    batches = store.watch(prefix, start_revision)
    async with aclosing(batches):
        yield Following(batches)


DRIVERS: dict[str, type[EtcdStore]] = {"http2": EtcdStore, "etcd3": Etcd3Store}
"""The drivers that reach real etcd members."""

PATIENT_DRIVERS: dict[str, type[EtcdStore]] = {
    "http2": PatientEtcdStore,
    "etcd3": PatientEtcd3Store,
}
"""The same, with generous timeouts."""

SECURE = " over TLS with a user"

real_etcd = [
    *(pytest.param(name, marks=pytest.mark.etcd) for name in DRIVERS),
    *(pytest.param(name + SECURE, marks=[pytest.mark.etcd, pytest.mark.long]) for name in DRIVERS),
]


@pytest.fixture(scope="session")
def etcd_cluster() -> Iterator[EtcdCluster]:
    """Three members for the whole test session, which a busy machine does not make elect anew."""
    with EtcdCluster(arguments=ELECTION) as cluster:
        yield cluster


@pytest.fixture(params=["memory", "embedded", *real_etcd], name="backing")
def _backing(request: pytest.FixtureRequest) -> tuple[str, EtcdCluster | None]:
    """Sync, so that real members start outside the event loop."""
    name = str(request.param)
    cluster = None
    if name.removesuffix(SECURE) in DRIVERS:
        wanted = "secure_etcd_cluster" if name.endswith(SECURE) else "etcd_cluster"
        cluster = request.getfixturevalue(wanted)
        assert isinstance(cluster, EtcdCluster)
    return name, cluster


@pytest.fixture
async def backend(backing: tuple[str, EtcdCluster | None]) -> AsyncIterator[Backend]:
    name, cluster = backing
    if name == "memory":
        engine = MemoryEngine()
        made = Backend(lambda: MemoryStore(engine))
        yield made
        await made.close()
    elif name == "embedded":
        async with EmbeddedServer() as server:
            access = Access((server.endpoint,))
            made = Backend(lambda: PatientEtcdStore(access), access)
            yield made
            await made.close()
    else:
        assert cluster is not None
        access, kind = cluster.access(), name.removesuffix(SECURE)
        driver, patient = DRIVERS[kind], PATIENT_DRIVERS[kind]
        if name.endswith(SECURE):
            access = await asyncio.to_thread(root_access, cluster)
        first = itertools.count()
        made = Backend(lambda: patient(access, first=next(first)), access, driver)
        yield made
        await made.close()


@pytest.fixture
async def store(backend: Backend) -> Store:
    return backend.connect()


@pytest.fixture
async def empty_store(store: Store) -> None:
    """Leave no other test's jobs in ``store``, for who follows the jobs of all namespaces."""
    await store.txn([], [Delete(ROOT, prefix=True)])
