# SPDX-License-Identifier: Apache-2.0
"""The contract of every store driver beside its answers to calls (``test_store_differential``).

Several clients at once, amounts, and what ends by time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from launcher_shim.c10d.values.transactions import MAX_VALUE_BYTES
from launcher_shim.tcpstore.wire import KEY_MAX
from rdzv.errors import LeaseLost, StoreFull, StoreRefused
from rdzv.keys import JobKeys
from rdzv.mirror import read_all
from rdzv.store import Compare, KeyValue, Put, Range, Store, TxnResult
from rdzv.store.etcd.client import EtcdStore
from tests.support.store.backend import PATIENT_DRIVERS, Backend, following
from tests.support.store.etcd_cluster import EtcdCluster

RENEWED_TTL_S = 30
"""Fifteen times as long as the test waits between two renewals."""

LEFT_TTL_S = 12


async def put(store: Store, key: str, value: bytes = b"") -> int:
    return (await store.txn([], [Put(key, value)])).revision


async def one(store: Store, key: str) -> KeyValue:
    (kv,) = (await store.range(key)).kvs
    return kv


async def test_what_no_store_can_take_is_refused(store: Store, backend: Backend) -> None:
    key = backend.prefix + "a"
    with pytest.raises(StoreRefused):
        await store.range("")
    await put(store, key)
    with pytest.raises(StoreRefused):
        await store.txn([Compare(key, "mod", "=", b"1")], [])
    with pytest.raises(StoreRefused):
        await store.txn([Compare(key, "value", "=", 1)], [])
    for lease in (0, -1):
        with pytest.raises(ValueError, match="lease id"):
            await store.lease_grant(lease, 10)


async def test_the_longest_key_and_value_of_a_launcher_fit_in_one_write(
    store: Store, backend: Backend
) -> None:
    """Each byte of the key is spelled with three, and the write compares besides."""
    of_run = JobKeys("team", "digits").in_generation(1).run("digits")
    key = backend.prefix + of_run.value(b"\xff" * KEY_MAX)
    value = b"v" * MAX_VALUE_BYTES
    written = await store.txn([Compare(key, "mod", "=", 0)], [Put(key, value)], [Range(key)])
    assert written.succeeded
    assert (await one(store, key)).value == value


async def test_one_of_a_hundred_concurrent_claims_wins(backend: Backend) -> None:
    clients = [backend.connect() for _ in range(4)]
    key = backend.prefix + "claim"

    async def claim(number: int) -> TxnResult:
        return await clients[number % 4].txn(
            [Compare(key, "create", "=", 0)], [Put(key, b"%d" % number)], [Range(key)]
        )

    results = await asyncio.gather(*map(claim, range(100)))
    (winner,) = (number for number, result in enumerate(results) if result.succeeded)
    kv = await one(clients[0], key)
    assert kv.value == b"%d" % winner
    assert [result.responses[0] for result in results if not result.succeeded] == [(kv,)] * 99


async def test_what_one_client_wrote_another_reads(backend: Backend) -> None:
    writer, reader = backend.connect(), backend.connect()
    for number in range(20):
        revision = await put(writer, backend.prefix + "a", b"%d" % number)
        found = await reader.range(backend.prefix + "a")
        assert found.kvs[0].value == b"%d" % number
        assert found.revision >= revision


async def test_status_names_the_endpoint(store: Store, backend: Backend) -> None:
    revision = await put(store, backend.prefix + "a", b"x" * 1000)
    status = await store.status()
    assert status.version.startswith("3.")
    assert status.revision >= revision
    assert status.cluster_id > 0
    assert status.leader_id > 0
    assert status.db_size_bytes >= status.db_size_in_use_bytes >= 1000
    assert status.errors == ()
    if backend.endpoints:
        assert status.endpoint in backend.endpoints


async def test_everything_is_read_however_much_it_is(store: Store, backend: Backend) -> None:
    p = backend.prefix
    odd = [p + "a", p + "a\0", p + "a\udcff", p + "é", p + "\udcff"]
    await store.txn([], [Put(key, b"") for key in odd])
    for part in range(11):
        await store.txn([], [Put(f"{p}{part:02}/{number:03}", b"") for number in range(100)])
    read = await read_all(store, p, timeout_s=60)
    assert read.kvs == (await store.range(p, prefix=True)).kvs
    assert len(read.kvs) == 1100 + len(odd)
    whole = await store.range("", prefix=True)
    assert set(read.kvs) <= set(whole.kvs)


async def test_a_lease_lives_on_its_renewals_and_takes_its_keys_along(
    store: Store, backend: Backend
) -> None:
    p, renewed, left = backend.prefix, next(backend.lease_ids), next(backend.lease_ids)
    await store.lease_grant(renewed, RENEWED_TTL_S)
    await store.lease_grant(left, LEFT_TTL_S)
    leases = {"a": left, "b": left, "c": 0, "d": renewed}
    written = await store.txn([], [Put(p + name, b"", leases[name]) for name in "bacd"])
    assert await store.lease_keep_alive(left) >= LEFT_TTL_S
    async with following(store, p, written.revision + 1) as follower:
        # Beyond the time to live; the watch's signs of life are when to renew.
        beyond_s = time.monotonic() + RENEWED_TTL_S + 2
        while time.monotonic() < beyond_s:
            await follower.batch()
            assert await store.lease_keep_alive(renewed) >= RENEWED_TTL_S
        await follower.count(2)
    assert follower.seen() == [("delete", p + "a", b""), ("delete", p + "b", b"")]
    # In one revision, whichever: leases of tests before this one may expire in between.
    assert len({event.kv.mod_revision for event in follower.events}) == 1
    assert [kv.key for kv in (await store.range(p, prefix=True)).kvs] == [p + "c", p + "d"]
    with pytest.raises(LeaseLost):
        await store.lease_keep_alive(left)
    with pytest.raises(LeaseLost):
        await store.txn([], [Put(p + "a", b"", left)])
    await store.lease_revoke(renewed)


@pytest.fixture
def small() -> Iterator[EtcdCluster]:
    with EtcdCluster(1, arguments=[f"--quota-backend-bytes={8 << 20}"]) as member:
        yield member


@pytest.mark.etcd
@pytest.mark.parametrize("driver", PATIENT_DRIVERS.values())
async def test_a_write_that_finds_no_space_may_have_been_applied(
    small: EtcdCluster, driver: type[EtcdStore]
) -> None:
    store = driver(small.endpoints)
    # How many go in is the disk's affair: etcd counts the size of its file, which it writes behind.
    try:
        for number in range(1000):
            await put(store, f"/{number}", bytes(1 << 20))
    except StoreFull:
        pass
    # It may be there or not, both have been seen under these words: the one that takes the last
    # room is applied. Whatever comes after it is not.
    with pytest.raises(StoreFull, match="space"):
        await put(store, "/next", bytes(1 << 20))
    assert (await store.range("/next")).kvs == ()
    await store.close()
