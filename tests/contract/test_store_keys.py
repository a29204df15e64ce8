# SPDX-License-Identifier: Apache-2.0
"""The contract of every store driver: keys, ranges and transactions."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from rdzv.errors import LeaseLost, StoreRefused
from rdzv.store import Compare, Delete, KeyValue, Operation, Put, Range, Store, TxnResult
from tests.support.store.backend import Backend
from tests.support.store.patient_store import CALL_S

Target = Literal["create", "mod", "version", "lease", "value"]
Operator = Literal["=", "!=", "<", ">"]


async def put(store: Store, key: str, value: bytes = b"", lease: int = 0) -> int:
    return (await store.txn([], [Put(key, value, lease)])).revision


async def one(store: Store, key: str) -> KeyValue | None:
    kvs = (await store.range(key)).kvs
    assert len(kvs) <= 1
    return kvs[0] if kvs else None


async def test_a_key_tells_its_story(store: Store, backend: Backend) -> None:
    key = backend.prefix + "key"
    assert await one(store, key) is None
    first = await put(store, key, b"1")
    assert await one(store, key) == KeyValue(key, b"1", first, first, 1, 0)
    second = await put(store, key, b"2")
    assert second == first + 1
    assert await one(store, key) == KeyValue(key, b"2", first, second, 2, 0)
    await store.txn([], [Delete(key)])
    assert await one(store, key) is None
    again = await put(store, key, b"3")
    assert await one(store, key) == KeyValue(key, b"3", again, again, 1, 0)


async def test_a_read_changes_no_revision_and_a_transaction_is_one(
    store: Store, backend: Backend
) -> None:
    p = backend.prefix
    before = (await store.range(p, prefix=True)).revision
    result = await store.txn([], [Put(p + "a", b""), Put(p + "b", b""), Range(p, prefix=True)])
    assert result.revision == before + 1
    found = await store.range(p, prefix=True)
    assert found.revision == before + 1
    assert {kv.mod_revision for kv in found.kvs} == {before + 1}
    nothing = await store.txn([], [Delete(p + "absent"), Range(p + "a")])
    assert nothing.revision == before + 1


async def test_a_prefix_is_a_prefix_and_comes_in_key_order(store: Store, backend: Backend) -> None:
    p = backend.prefix
    names = ["a", "a/", "a/1", "a/10", "a/2", "a/é", "a/\U0001f600", "a0", "a.", "b/1"]
    for name in reversed(names):
        await put(store, p + name)
    kvs = (await store.range(p + "a/", prefix=True)).kvs
    assert [kv.key for kv in kvs] == [
        p + name for name in ("a/", "a/1", "a/10", "a/2", "a/é", "a/\U0001f600")
    ]
    assert [kv.key for kv in (await store.range(p + "a")).kvs] == [p + "a"]
    everything = (await store.range("", prefix=True)).kvs
    assert {p + name for name in names} <= {kv.key for kv in everything}


@pytest.mark.parametrize(
    "name",
    ["50%25", "a//b", "slash/", "späße", "日本", "\U0001f600", "sp ace", "q?#&=", "\x01", "\x7f"],
)
async def test_odd_keys_come_back_as_they_were(store: Store, backend: Backend, name: str) -> None:
    key = backend.prefix + name
    await put(store, key, name.encode())
    assert (kv := await one(store, key)) is not None
    assert (kv.key, kv.value) == (key, name.encode())
    listed = (await store.range(key, prefix=True)).kvs
    assert [kv.key for kv in listed] == [key]


@pytest.mark.parametrize("size", [0, 1, 4096, 65536])
async def test_values_are_bytes_of_any_kind(store: Store, backend: Backend, size: int) -> None:
    value = bytes(i % 256 for i in range(size))
    await put(store, backend.prefix + "v", value)
    assert (kv := await one(store, backend.prefix + "v")) is not None
    assert kv.value == value


async def test_a_transaction_takes_one_branch_whole(store: Store, backend: Backend) -> None:
    p = backend.prefix
    await put(store, p + "a", b"old")
    taken = await store.txn(
        [Compare(p + "a", "value", "=", b"old"), Compare(p + "b", "create", "=", 0)],
        [Put(p + "a", b"new"), Range(p + "a"), Delete(p, prefix=False)],
        [Put(p + "c", b"")],
    )
    assert taken.succeeded
    assert taken.responses[0] is None
    assert isinstance(taken.responses[1], tuple)
    assert [kv.value for kv in taken.responses[1]] == [b"new"]
    assert taken.responses[2] == 0
    other = await store.txn(
        [Compare(p + "a", "value", "=", b"new"), Compare(p + "b", "create", ">", 0)],
        [Delete(p, prefix=True)],
        [Put(p + "d", b""), Put(p + "e", b"")],
    )
    assert not other.succeeded
    assert other.responses == (None, None)
    assert [kv.key for kv in (await store.range(p, prefix=True)).kvs] == [p + "a", p + "d", p + "e"]


async def test_deleting_a_prefix_counts_what_was_there(store: Store, backend: Backend) -> None:
    p = backend.prefix
    for name in ("x/1", "x/2", "x/3", "x0"):
        await put(store, p + name)
    result = await store.txn([], [Delete(p + "x/", prefix=True)])
    assert result.responses == (3,)
    assert [kv.key for kv in (await store.range(p, prefix=True)).kvs] == [p + "x0"]


async def holds(store: Store, compare: Compare) -> bool:
    return (await store.txn([compare], [])).succeeded


@pytest.mark.parametrize(
    ("target", "operand"), [("create", 0), ("mod", 0), ("version", 0), ("lease", 0)]
)
async def test_a_missing_key_counts_as_zero(
    store: Store, backend: Backend, target: Target, operand: int
) -> None:
    key = backend.prefix + "absent"
    assert await holds(store, Compare(key, target, "=", operand))
    assert await holds(store, Compare(key, target, "<", operand + 1))
    assert not await holds(store, Compare(key, target, "!=", operand))
    assert not await holds(store, Compare(key, target, ">", operand))


async def test_the_value_of_a_missing_key_matches_nothing(store: Store, backend: Backend) -> None:
    key = backend.prefix + "absent"
    operators: tuple[Operator, ...] = ("=", "!=", "<", ">")
    for op in operators:
        assert not await holds(store, Compare(key, "value", op, b""))


async def test_every_compare_target(store: Store, backend: Backend) -> None:
    key, lease = backend.prefix + "key", next(backend.lease_ids)
    await store.lease_grant(lease, 30)
    create = await put(store, key, b"1")
    mod = await put(store, key, b"m", lease)
    facts: list[tuple[Target, int | bytes, int | bytes, int | bytes]] = [
        ("create", create - 1, create, create + 1),
        ("mod", mod - 1, mod, mod + 1),
        ("version", 1, 2, 3),
        ("lease", lease - 1, lease, lease + 1),
        ("value", b"l", b"m", b"n"),
    ]
    for target, less, equal, more in facts:
        assert await holds(store, Compare(key, target, "=", equal))
        assert not await holds(store, Compare(key, target, "!=", equal))
        assert await holds(store, Compare(key, target, "!=", more))
        assert await holds(store, Compare(key, target, "<", more))
        assert not await holds(store, Compare(key, target, "<", equal))
        assert await holds(store, Compare(key, target, ">", less))
        assert not await holds(store, Compare(key, target, ">", equal))
    await store.lease_revoke(lease)


async def test_a_range_compare_holds_for_every_key(store: Store, backend: Backend) -> None:
    p = backend.prefix + "m/"
    first = await put(store, p + "1", b"x")
    second = await put(store, p + "2", b"x")
    await put(store, backend.prefix + "m0", b"outside")
    assert await holds(store, Compare(p, "mod", "<", second + 1, prefix=True))
    assert not await holds(store, Compare(p, "mod", "<", second, prefix=True))
    assert not await holds(store, Compare(p, "mod", "=", first, prefix=True))
    assert await holds(store, Compare(p, "value", "=", b"x", prefix=True))
    assert not await holds(store, Compare(p, "create", "=", 0, prefix=True))


async def test_a_range_compare_of_nothing_is_one_of_a_missing_key(
    store: Store, backend: Backend
) -> None:
    p = backend.prefix + "m/"
    empty = Compare(p, "create", "=", 0, prefix=True)
    assert await holds(store, empty)
    assert await holds(store, Compare(p, "mod", "<", 1, prefix=True))
    assert not await holds(store, Compare(p, "mod", ">", 0, prefix=True))
    assert not await holds(store, Compare(p, "value", "=", b"x", prefix=True))


async def test_a_range_compare_cannot_see_deletions(store: Store, backend: Backend) -> None:
    p = backend.prefix + "m/"
    await put(store, p + "1")
    before = await put(store, p + "2")
    await store.txn([], [Delete(p + "1")])
    assert await holds(store, Compare(p, "mod", "<", before + 1, prefix=True))
    await store.txn([], [Delete(p, prefix=True)])
    assert await holds(store, Compare(p, "create", "=", 0, prefix=True))


async def test_a_put_on_a_missing_lease_changes_nothing(store: Store, backend: Backend) -> None:
    p, lease = backend.prefix, next(backend.lease_ids)
    before = await put(store, p + "b", b"old")
    with pytest.raises(LeaseLost):
        await store.txn([], [Put(p + "a", b""), Delete(p + "b"), Put(p + "c", b"", lease=lease)])
    found = await store.range(p, prefix=True)
    assert [kv.key for kv in found.kvs] == [p + "b"]
    assert found.revision == before


async def test_only_the_branch_taken_needs_its_lease(store: Store, backend: Backend) -> None:
    key, lease = backend.prefix + "a", next(backend.lease_ids)
    result = await store.txn(
        [Compare(key, "create", "=", 0)], [Put(key, b"1")], [Put(key, b"", lease=lease)]
    )
    assert result.succeeded


@pytest.mark.parametrize("which", ["put twice", "put and delete", "no key", "too many"])
async def test_malformed_transactions_are_refused(
    store: Store, backend: Backend, which: str
) -> None:
    key = backend.prefix + "a"
    malformed: dict[str, list[Operation]] = {
        "put twice": [Put(key, b"1"), Put(key, b"2")],
        "put and delete": [Put(key, b"1"), Delete(backend.prefix, prefix=True)],
        "no key": [Put("", b"1")],
        "too many": [Put(f"{key}{number}", b"") for number in range(129)],
    }
    operations = malformed[which]
    with pytest.raises(StoreRefused):
        await store.txn([], operations)
    with pytest.raises(StoreRefused):
        await store.txn([Compare(key, "create", ">", 0)], operations)
    assert (await store.range(backend.prefix, prefix=True)).kvs == ()


async def test_a_read_without_a_key_is_refused(store: Store) -> None:
    with pytest.raises(StoreRefused):
        await store.range("")


async def test_a_compare_with_the_wrong_kind_of_operand_is_refused(
    store: Store, backend: Backend
) -> None:
    await put(store, backend.prefix + "a")
    with pytest.raises(StoreRefused):
        await store.txn([Compare(backend.prefix + "a", "mod", "=", b"1")], [])
    with pytest.raises(StoreRefused):
        await store.txn([Compare(backend.prefix + "a", "value", "=", 1)], [])


async def test_one_of_a_hundred_concurrent_claims_wins(backend: Backend) -> None:
    clients = [backend.connect() for _ in range(4)]
    key = backend.prefix + "claim"

    async def claim(number: int) -> TxnResult:
        return await clients[number % 4].txn(
            [Compare(key, "create", "=", 0)],
            [Put(key, b"%d" % number)],
            [Range(key)],
            timeout_s=CALL_S,
        )

    results = await asyncio.gather(*map(claim, range(100)))
    winners = [number for number, result in enumerate(results) if result.succeeded]
    assert len(winners) == 1
    kv = await one(clients[0], key)
    assert kv is not None
    assert kv.value == b"%d" % winners[0]
    losers = [result.responses[0] for result in results if not result.succeeded]
    assert losers == [(kv,)] * 99


async def test_concurrent_increments_all_count(backend: Backend) -> None:
    clients = [backend.connect() for _ in range(4)]
    key = backend.prefix + "counter"
    await put(clients[0], key, b"0")

    async def increment(number: int) -> None:
        client = clients[number % 4]
        kv = await one(client, key)
        while True:
            assert kv is not None
            result = await client.txn(
                [Compare(key, "mod", "=", kv.mod_revision)],
                [Put(key, b"%d" % (int(kv.value) + 1))],
                [Range(key)],
                timeout_s=CALL_S,
            )
            if result.succeeded:
                return
            (found,) = result.responses
            assert isinstance(found, tuple)
            kv = found[0]

    # All of them wait for each of them: of a hundred, one could wait for longer than an attempt.
    await asyncio.gather(*map(increment, range(32)))
    kv = await one(clients[0], key)
    assert kv is not None
    assert (kv.value, kv.version) == (b"32", 33)


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
