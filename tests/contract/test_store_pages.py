# SPDX-License-Identifier: Apache-2.0
"""The contract of every store driver: reading a prefix in pages, as of one revision."""

from __future__ import annotations

import pytest

from rdzv.errors import Compacted, StoreRefused
from rdzv.paging import PagedRead, Paging, read_all
from rdzv.store import Delete, KeyValue, Put, Store
from tests.support.store.backend import Backend


async def written(store: Store, prefix: str, count: int) -> int:
    """Write so many keys under ``prefix``; return the revision."""
    puts = [Put(f"{prefix}{number:03}", b"%d" % number) for number in range(count)]
    return (await store.txn([], puts)).revision


def names(kvs: tuple[KeyValue, ...]) -> list[str]:
    return [kv.key.rpartition("/")[2] for kv in kvs]


async def test_pages_give_every_key_once_and_in_order(store: Store, backend: Backend) -> None:
    p = backend.prefix + "a/"
    revision = await written(store, p, 7)
    await store.txn([], [Put(backend.prefix + "a0", b"beyond"), Put(backend.prefix + "a", b"")])
    first = await store.page(p, limit=3)
    assert names(first.kvs) == ["000", "001", "002"]
    assert first.more
    assert first.revision >= revision
    second = await store.page(p, limit=3, after=p + "002", revision=first.revision)
    assert names(second.kvs) == ["003", "004", "005"]
    assert (second.more, second.revision) == (True, first.revision)
    last = await store.page(p, limit=3, after=p + "005", revision=first.revision)
    assert names(last.kvs) == ["006"]
    assert not last.more
    assert (first.kvs + second.kvs + last.kvs) == (await store.range(p, prefix=True)).kvs


async def test_a_page_that_holds_the_last_key_says_so(store: Store, backend: Backend) -> None:
    p = backend.prefix
    await written(store, p, 4)
    assert not (await store.page(p, limit=4)).more
    assert not (await store.page(p, limit=100)).more
    assert not (await store.page(p, limit=2, after=p + "001")).more
    empty = await store.page(p + "none/", limit=2)
    assert (empty.kvs, empty.more) == ((), False)


async def test_all_pages_are_of_one_revision(store: Store, backend: Backend) -> None:
    p = backend.prefix
    await written(store, p, 4)
    first = await store.page(p, limit=2)
    await store.txn([], [Delete(p + "001"), Delete(p + "002"), Put(p + "003", b"new")])
    await store.txn([], [Put(p + "0025", b"between"), Put(p + "004", b"after")])
    rest = await store.page(p, limit=9, after=p + "001", revision=first.revision)
    assert [(kv.key, kv.value) for kv in rest.kvs] == [(p + "002", b"2"), (p + "003", b"3")]
    assert rest.revision == first.revision


async def test_a_revision_that_is_gone_or_was_never_reached_is_told_of(
    store: Store, backend: Backend
) -> None:
    p = backend.prefix
    first = await store.page(p, limit=1)
    revision = await written(store, p, 3)
    await store.compact(revision)
    with pytest.raises(Compacted):
        await store.page(p, limit=1, after=p + "000", revision=first.revision)
    with pytest.raises(StoreRefused):
        await store.page(p, limit=1, revision=revision + 1000)


async def test_keys_of_any_bytes_are_paged(store: Store, backend: Backend) -> None:
    p = backend.prefix
    keys = [p + "a", p + "a\0", p + "a\udcff", p + "é", p + "\udcff"]
    await store.txn([], [Put(key, b"") for key in keys])
    read = PagedRead(p, Paging(keys=1))
    while not read.whole:
        await read.step(store)
        read.paging = Paging(keys=1)
    assert read.kvs == list((await store.range(p, prefix=True)).kvs)
    assert len(read.kvs) == len(keys)


async def test_everything_is_read_however_much_it_is(store: Store, backend: Backend) -> None:
    p = backend.prefix
    for part in range(11):
        await written(store, f"{p}{part:02}/", 100)
    read = await read_all(store, p, timeout_s=30)
    assert read.kvs == (await store.range(p, prefix=True)).kvs
    assert len(read.kvs) == 1100
