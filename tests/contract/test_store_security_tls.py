# SPDX-License-Identifier: Apache-2.0
"""TLS to a real etcd: who is verified, users by the name in a certificate, and rotated files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from rdzv.errors import StoreAmbiguous, StoreError, StoreRefused, StoreUnavailable
from rdzv.keys import JobKeys
from rdzv.store import Put, Store, WatchEvent
from rdzv.store.access import Access
from rdzv.store.etcd.admin import JobRole, auth_enabled
from tests.support.store.certificates import Authority
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.patient_store import CALL_S, PatientRights
from tests.support.store.secure import named_cluster, opened

__all__ = ["named_cluster"]

pytestmark = pytest.mark.etcd

MINE, THEIRS = JobKeys("team", "train"), JobKeys("team", "train-2")
RECOVERY_S = 90.0
"""A look at the files, a handshake, and a machine that is busy elsewhere."""
TOLD_S = 20.0
"""For a whole attempt after one that took too long here: the reason of the last one is told."""


@pytest.fixture
def _urgent_looks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files looked at only where there is no connection: who recovers has not waited long."""
    monkeypatch.setattr("rdzv.store.etcd.credentials.LOOK_S", 600.0)


@pytest.fixture
def tls_cluster() -> Iterator[EtcdCluster]:
    """One member of the test's own, that speaks TLS and asks nobody who he is."""
    with EtcdCluster(1, tls=True) as cluster:
        yield cluster


def certified(
    cluster: EtcdCluster, name: str, common_name: str, life: timedelta = timedelta(hours=1)
) -> Access:
    """Access by a client certificate, whose files are written here."""
    cert, key = cluster.authority.client(common_name, name, life)
    return cluster.access(cert=str(cert), key=str(key))


async def job_by_certificate(cluster: EtcdCluster, keys: JobKeys) -> str:
    """Make the job's user without a password; return its name."""
    role = JobRole(keys)
    rights = PatientRights(await asyncio.to_thread(certified, cluster, "root", "root"))
    await rights.make(role, None)
    await rights.close()
    return role.user_name


async def until_answered(store: Store) -> None:
    async with asyncio.timeout(RECOVERY_S):
        while True:
            try:
                await store.range(MINE.job, timeout_s=1)
            except StoreError:
                await asyncio.sleep(0.05)
            else:
                return


@asynccontextmanager
async def watched(store: Store, prefix: str) -> AsyncIterator[list[WatchEvent]]:
    """Collect the events under ``prefix`` from now on."""
    events: list[WatchEvent] = []
    revision = (await store.range(prefix, timeout_s=CALL_S)).revision

    async def collect() -> None:
        async with aclosing(store.watch(prefix, revision + 1)) as batches:
            async for batch in batches:
                events.extend(batch.events)

    task = asyncio.create_task(collect())
    try:
        yield events
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait({task})


async def until_seen(events: list[WatchEvent], values: list[bytes]) -> None:
    """Wait for these values, each once and in order."""
    async with asyncio.timeout(RECOVERY_S):
        while len(events) < len(values):  # noqa: ASYNC110 - collected by a task of the test
            await asyncio.sleep(0.02)
    assert [event.kv.value for event in events] == values


async def test_a_certificates_name_is_the_user(named_cluster: EtcdCluster) -> None:
    name = await job_by_certificate(named_cluster, MINE)
    access = await asyncio.to_thread(certified, named_cluster, "mine", name)
    async with opened(access, patiently=True) as store:
        async with watched(store, MINE.prefix) as events:
            await store.txn([], [Put(MINE.job, b"1")])
            await until_seen(events, [b"1"])
        with pytest.raises(StoreRefused, match="permission denied"):
            await store.range(THEIRS.job)
        with pytest.raises(StoreRefused, match="permission denied"):
            await anext(store.watch(THEIRS.prefix, 1))
    assert await auth_enabled(access, timeout_s=CALL_S)


@pytest.mark.usefixtures("_urgent_looks_only")
async def test_a_certificate_out_of_date_works_as_soon_as_there_is_a_new_one(
    named_cluster: EtcdCluster,
) -> None:
    name = await job_by_certificate(named_cluster, MINE)
    life = timedelta(hours=-1)
    access = await asyncio.to_thread(certified, named_cluster, "outdated", name, life)
    async with opened(access) as store:
        with pytest.raises(StoreUnavailable):
            await store.range(MINE.job)
        with pytest.raises((StoreUnavailable, StoreAmbiguous)):
            await store.txn([], [Put(MINE.job, b"x")])
        await asyncio.to_thread(certified, named_cluster, "outdated", name)
        await until_answered(store)


async def test_a_rotated_certificate_takes_over_and_the_watch_misses_nothing(
    named_cluster: EtcdCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The new certificate names another user, so that its use can be seen."""
    caplog.set_level("INFO")
    name = await job_by_certificate(named_cluster, MINE)
    access = await asyncio.to_thread(certified, named_cluster, "rotated", name)
    root = await asyncio.to_thread(certified, named_cluster, "root", "root")
    async with (
        opened(access, patiently=True) as store,
        opened(root, patiently=True) as writer,
        watched(store, MINE.prefix) as events,
    ):
        with pytest.raises(StoreRefused):
            await store.range(THEIRS.job)
        values = [str(number).encode() for number in range(60)]

        async def write() -> None:
            for value in values:
                await writer.txn([], [Put(MINE.job, value)])
                await asyncio.sleep(0.1)

        writing = asyncio.create_task(write())
        await asyncio.to_thread(certified, named_cluster, "rotated", "root")
        async with asyncio.timeout(RECOVERY_S):
            while True:
                # A renewal of a lease, every few seconds, looks at the files in the same way.
                await store.range(MINE.job)
                try:
                    await store.range(THEIRS.job)
                    break
                except StoreRefused:
                    await asyncio.sleep(0.2)
        await writing
        await until_seen(events, values)
    assert "the certificate files have changed" in caplog.text


@pytest.mark.usefixtures("_urgent_looks_only")
async def test_a_new_authority_is_trusted_as_soon_as_its_certificate_is_there(
    tls_cluster: EtcdCluster,
) -> None:
    """The store goes first: all that connects meanwhile is refused by this side."""
    async with (
        opened(tls_cluster.access()) as store,
        opened(tls_cluster.access(), patiently=True) as writer,
        watched(store, MINE.prefix) as events,
    ):
        await writer.txn([], [Put(MINE.job, b"before")])
        folder = tls_cluster.folder
        new = await asyncio.to_thread(Authority, folder, "new-ca")
        await asyncio.to_thread(new.server)
        await asyncio.to_thread(tls_cluster.restart, 0)
        with pytest.raises(StoreUnavailable, match="--etcd-cacert"):
            await store.range(MINE.job, timeout_s=TOLD_S)
        await asyncio.to_thread(new.cacert.replace, tls_cluster.authority.cacert)
        await until_answered(store)
        await writer.txn([], [Put(MINE.job, b"after")])
        await until_seen(events, [b"before", b"after"])


def by_another_name(cluster: EtcdCluster, folder: Path) -> Access:
    """etcd reads its certificate again for each connection."""
    cluster.authority.server(host="elsewhere", ip="127.0.0.9")
    return cluster.access()


def by_another_authority(cluster: EtcdCluster, folder: Path) -> Access:
    return cluster.access(cacert=str(Authority(folder).cacert))


def without_tls(cluster: EtcdCluster, folder: Path) -> Access:
    return Access(cluster.access().targets)


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (by_another_name, "not for this host name"),
        (by_another_authority, "--etcd-cacert"),
        (without_tls, None),
    ],
)
async def test_a_client_does_not_meet_a_store_that_it_cannot_verify(
    tls_cluster: EtcdCluster,
    tmp_path: Path,
    way: Callable[[EtcdCluster, Path], Access],
    said: str | None,
) -> None:
    access = await asyncio.to_thread(way, tls_cluster, tmp_path)
    async with opened(access) as store:
        with pytest.raises(StoreUnavailable, match=said):
            await store.range(MINE.job, timeout_s=TOLD_S)
        with pytest.raises((StoreUnavailable, StoreAmbiguous)):
            await store.txn([], [Put(MINE.job, b"x")])


async def test_a_client_with_tls_and_a_store_without_do_not_meet(
    etcd_cluster: EtcdCluster, tmp_path: Path
) -> None:
    authority = await asyncio.to_thread(Authority, tmp_path)
    endpoints = tuple(f"https://{endpoint}" for endpoint in etcd_cluster.endpoints)
    async with opened(Access(endpoints, str(authority.cacert))) as store:
        with pytest.raises(StoreUnavailable, match="check that the endpoint speaks it"):
            await store.range(MINE.job, timeout_s=TOLD_S)
