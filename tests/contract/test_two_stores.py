# SPDX-License-Identifier: Apache-2.0
"""Endpoints that belong to two stores, on real etcd: nothing is read or written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from random import Random

import pytest

from agent.job_config import JobConfig
from console.doctor.command import examine
from console.doctor.diagnosis import diagnose
from console.job.reading import look
from rdzv.errors import Compacted, StoreError, StoreRefused
from rdzv.pacing import Patience
from rdzv.settings import load
from rdzv.store import Compare, Put
from rdzv.store.etcd import endpoint
from rdzv.store.etcd.client import EtcdStore
from tests.support.store.backend import PATIENT_DRIVERS
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.patient_store import CALL_S, LongPatience, PatientEtcdStore
from tests.support.store.tcp_proxy import TcpProxy

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(600)]

KEY = "/two/key"
REFUSED = "the endpoints belong to 2 different stores"


@pytest.fixture(scope="module")
def stores() -> Iterator[tuple[EtcdCluster, EtcdCluster]]:
    """Two, of one member each."""
    with EtcdCluster(1) as one, EtcdCluster(1) as other:
        yield one, other


class Scene:
    """A proxy to each of the two stores, so that either can be away, and clients of both."""

    def __init__(self, driver: type[EtcdStore], proxies: list[TcpProxy]) -> None:
        self._driver = driver
        self.proxies = proxies
        self._clients: list[EtcdStore] = []

    def client(self, first: int = 0) -> EtcdStore:
        """A client that begins with one of them."""
        made = self._driver([proxy.endpoint for proxy in self.proxies], first=first)
        self._clients.append(made)
        return made

    def config(self) -> JobConfig:
        """What a command of ``muster`` is given of both."""
        endpoints = ",".join(proxy.endpoint for proxy in self.proxies)
        return load(JobConfig, {"etcd_endpoints": endpoints, "job": "j"}, {})

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


@pytest.fixture(params=PATIENT_DRIVERS)
async def scene(
    request: pytest.FixtureRequest, stores: tuple[EtcdCluster, EtcdCluster]
) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        proxies = [
            await stack.enter_async_context(TcpProxy(cluster.endpoints[0])) for cluster in stores
        ]
        made = Scene(PATIENT_DRIVERS[request.param], proxies)
        yield made
        await made.close()


async def write(store: EtcdStore, value: bytes) -> None:
    await store.txn([], [Put(KEY, value)], timeout_s=20)


async def held(cluster: EtcdCluster) -> bytes:
    """What the store has at the key; empties it."""
    store = EtcdStore(cluster.endpoints)
    try:
        read = await store.range(KEY, timeout_s=CALL_S)
        await store.txn([], [Put(KEY, b"")], timeout_s=CALL_S)
        return read.kvs[0].value if read.kvs else b""
    finally:
        await store.close()


@pytest.mark.parametrize("first", [0, 1])
async def test_a_new_client_neither_reads_nor_writes(
    scene: Scene, stores: tuple[EtcdCluster, EtcdCluster], first: int
) -> None:
    client = scene.client(first)
    with pytest.raises(StoreRefused, match=REFUSED) as refused:
        await write(client, b"mine")
    for proxy in scene.proxies:
        assert f"{proxy.endpoint} to " in str(refused.value)
    assert "--etcd-endpoints" in str(refused.value)
    with pytest.raises(StoreRefused, match=REFUSED):
        await client.range(KEY, timeout_s=20)
    with pytest.raises(StoreRefused, match=REFUSED):
        await anext(client.watch("/two/", 1))
    assert [await held(cluster) for cluster in stores] == [b"", b""]


@pytest.mark.parametrize("hangs", [False, True], ids=["away", "hangs"])
async def test_failover_does_not_lead_into_another_store(
    scene: Scene,
    stores: tuple[EtcdCluster, EtcdCluster],
    hangs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene.proxies[1].cut()
    client = scene.client()
    await write(client, b"one")
    if hangs:
        monkeypatch.setattr(endpoint, "SAY_S", CALL_S)
        for one in client._calls.rotation:
            one.patience = Patience()
        scene.proxies[0].hold()
    else:
        scene.proxies[0].cut()
    scene.proxies[1].mend()
    for _ in range(4):
        with pytest.raises(StoreError):
            await client.range(KEY, timeout_s=3)
        with pytest.raises(StoreError):
            await client.txn([], [Put(KEY, b"astray")], timeout_s=3)
    scene.proxies[0].mend()
    assert await held(stores[1]) == b""
    # What a member that hangs was sent is there late, if anything is.
    assert await held(stores[0]) == b"one" or hangs


async def test_a_member_that_comes_later_is_found_out(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "ASK_AGAIN_S", 0.1)
    scene.proxies[1].cut()
    client = scene.client()
    await write(client, b"one")
    scene.proxies[1].mend()

    async def until_refused() -> None:
        while True:
            await client.range(KEY, timeout_s=20)
            await asyncio.sleep(0.05)

    with pytest.raises(StoreRefused, match=REFUSED):
        await asyncio.wait_for(until_refused(), CALL_S)


async def test_it_goes_on_once_the_endpoints_agree(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "SAY_S", 0.0)
    client = scene.client()
    with pytest.raises(StoreRefused, match=REFUSED):
        await write(client, b"mine")
    scene.proxies[1].cut()
    async with asyncio.timeout(CALL_S):
        while True:
            try:
                await write(client, b"mine")
                return
            except StoreError:
                await asyncio.sleep(0.1)


@pytest.fixture
def emptied() -> Iterator[EtcdCluster]:
    with EtcdCluster(3) as cluster:
        yield cluster


async def test_a_store_that_was_emptied_is_taken_for_the_new_one(emptied: EtcdCluster) -> None:
    client = EtcdStore(emptied.endpoints)
    for value in (b"1", b"2", b"3"):
        await client.txn([], [Put(KEY, value)], timeout_s=CALL_S)
    batches = client.watch("/two/", 1)
    await anext(batches)
    await asyncio.to_thread(emptied.empty)

    async def until_it_ends() -> None:
        async for _ in batches:
            pass

    with pytest.raises(Compacted):
        await asyncio.wait_for(until_it_ends(), CALL_S)
    absent = [Compare(KEY, "create", "=", 0)]
    assert (await client.txn(absent, [Put(KEY, b"new")], timeout_s=CALL_S)).succeeded
    await client.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no endpoint be taken for silent where commands open clients of their own."""
    monkeypatch.setattr(endpoint, "Patience", LongPatience)


@pytest.mark.usefixtures("patient")
async def test_status_says_it_in_place_of_the_job(scene: Scene) -> None:
    with pytest.raises(StoreRefused, match=REFUSED):
        await look(scene.config())


@pytest.mark.usefixtures("patient")
async def test_doctor_finds_both_and_writes_nothing(scene: Scene) -> None:
    report = await examine(scene.config(), Random(1))
    (found,) = [one for one in diagnose(report) if one.check == "cluster"]
    assert (found.level, REFUSED in found.sentence) == ("fault", True)
    assert report.rights.done == ()
    assert REFUSED in report.rights.error


@pytest.fixture
def asking() -> Iterator[EtcdCluster]:
    """One member that lets a job's user in by its certificate, as the chart's does."""
    with EtcdCluster(1, tls=True, client_certificates=True) as cluster:
        cluster.enable_auth()
        cluster.etcdctl("user", "add", "job", "--no-password")
        cluster.etcdctl("role", "add", "job")
        cluster.etcdctl("role", "grant-permission", "job", "readwrite", "/two/", "--prefix")
        cluster.etcdctl("user", "grant-role", "job", "job")
        yield cluster


async def test_each_endpoint_says_its_store_to_the_user_of_a_job(asking: EtcdCluster) -> None:
    certificate, key = await asyncio.to_thread(asking.authority.client, "job", "job")
    (member,) = asking.endpoints
    client = PatientEtcdStore(
        asking.access(
            **{"cert": str(certificate), "key": str(key)},
            endpoints=(member, member.replace("127.0.0.1", "localhost")),
        )
    )
    await write(client, b"mine")
    first, second = (one.store_id for one in client._calls.rotation)
    await client.close()
    assert first == second > 0
