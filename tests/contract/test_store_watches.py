# SPDX-License-Identifier: Apache-2.0
"""The contract of every store driver: watches (what they deliver: ``test_store_differential``)."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from rdzv.errors import Compacted, StoreRefused, StoreUnavailable
from rdzv.store import Delete, Put, Store
from rdzv.store.etcd import watch
from tests.support.store.backend import Backend, Following, following


async def put(store: Store, key: str, value: bytes = b"") -> int:
    return (await store.txn([], [Put(key, value)])).revision


async def test_an_idle_watch_shows_that_it_lives_and_how_far_the_store_is(
    store: Store, backend: Backend
) -> None:
    revision = await put(store, backend.prefix + "k")
    async with following(store, backend.prefix + "quiet/", revision + 1) as follower:
        await follower.until(lambda: len(follower.batches) >= 3)
        revision = await put(store, backend.prefix + "k")
        await follower.until(lambda: follower.batches[-1].revision >= revision)
    assert follower.events == []
    assert follower.batches == sorted(follower.batches, key=lambda batch: batch.revision)


async def test_a_sign_of_life_never_overtakes_an_event(backend: Backend) -> None:
    writer, watcher = backend.connect(), backend.connect()
    start = (await writer.range(backend.prefix)).revision + 1
    stop = asyncio.Event()
    written: list[int] = []

    async def write() -> None:
        while not stop.is_set():
            written.append(await put(writer, backend.prefix + "k"))
            await asyncio.sleep(0.001)

    async with following(watcher, backend.prefix, start) as follower:
        writing = asyncio.create_task(write())
        try:
            await follower.until(lambda: len(follower.events) >= 500)
        finally:
            stop.set()
            await writing
        await follower.count(len(written))
    reached = 0
    for batch in follower.batches:
        assert all(reached < event.kv.mod_revision <= batch.revision for event in batch.events)
        assert batch.revision >= reached
        reached = batch.revision
    assert [event.kv.mod_revision for event in follower.events] == written


async def test_a_busy_watch_rests_and_then_reads_all_at_once(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "BUSY_S", 3600.0)
    writer, watcher = backend.connect(), backend.connect()
    key, start = backend.prefix + "k", (await writer.range(backend.prefix)).revision + 1
    rests, rested, goes_on = 0, asyncio.Event(), asyncio.Event()

    async def rest() -> None:
        nonlocal rests
        rests += 1
        rested.set()
        await goes_on.wait()

    written = [await put(writer, key) for _ in range(watch.BUSY_REVISIONS)]
    async with aclosing(watcher.watch(backend.prefix, start, rest=rest)) as batches:
        follower = Following(batches)
        await follower.count(len(written))
        if backend.endpoints:  # a message of the memory driver costs nothing
            reading = asyncio.create_task(follower.batch())
            await rested.wait()
            written += [await put(writer, key) for _ in range(2 * watch.BUSY_REVISIONS)]
            before = len(follower.batches)
            goes_on.set()
            await reading
            await follower.count(len(written))
            assert len(follower.batches) - before < 5
            assert rests == 1
        written.append(await put(writer, key))
        await follower.count(len(written))
    assert [event.kv.mod_revision for event in follower.events] == written


async def test_a_quiet_watch_does_not_rest(backend: Backend) -> None:
    writer, watcher = backend.connect(), backend.connect()
    start = (await writer.range(backend.prefix)).revision + 1

    async def rest() -> None:
        pytest.fail("it rests")

    async with aclosing(watcher.watch(backend.prefix, start, rest=rest)) as batches:
        follower = Following(batches)
        for number in range(1, watch.BUSY_REVISIONS):
            await put(writer, backend.prefix + "k")
            await follower.count(number)


async def test_a_revision_is_never_split_however_much_there_is(backend: Backend) -> None:
    store = backend.connect()
    p = backend.prefix
    revisions = []
    for size in (60_000, *[12_000] * 30):
        puts = [Put(f"{p}{number:02}", b"x" * size) for number in range(20)]
        revisions.append((await store.txn([], puts)).revision)
    async with following(store, p, revisions[0]) as follower:
        await follower.count(20 * len(revisions))
    parts = [
        revision
        for batch in follower.batches
        for revision in sorted({event.kv.mod_revision for event in batch.events})
    ]
    assert parts == revisions


async def test_a_long_history_comes_whole_from_where_it_is_asked_for(backend: Backend) -> None:
    store = backend.connect()
    p, total = backend.prefix, 2500

    async def write(worker: int) -> list[int]:
        return [await put(store, f"{p}{worker}") for _ in range(total // 25)]

    written = await asyncio.gather(*map(write, range(25)))
    revisions = sorted(revision for part in written for revision in part)[4:]
    async with following(store, p, revisions[0]) as follower:
        await follower.count(len(revisions))
        revisions.append(await put(store, p))
        await follower.count(len(revisions))
    assert [event.kv.mod_revision for event in follower.events] == revisions


async def test_the_compacted_revision_itself_can_be_watched(store: Store, backend: Backend) -> None:
    p = backend.prefix
    await put(store, p + "k", b"1")
    before = await put(store, p + "other", b"2")
    deleted = (await store.txn([], [Delete(p + "k")])).revision
    await put(store, p + "k", b"3")
    await store.compact(deleted)
    async with following(store, p, deleted) as follower:
        await follower.count(2)
    assert follower.seen() == [("delete", p + "k", b""), ("put", p + "k", b"3")]
    with pytest.raises(Compacted) as gone:
        async with following(store, p, before) as follower:
            await follower.count(1)
    assert gone.value.compact_revision == deleted


async def test_a_compaction_does_not_disturb_a_watch_that_keeps_up(
    store: Store, backend: Backend
) -> None:
    p = backend.prefix
    start = (await store.range(p)).revision + 1
    async with following(store, p + "quiet/", start) as follower:
        await follower.until(lambda: len(follower.batches) >= 1)
        for _ in range(20):
            revision = await put(store, p + "k")
        # They may be repeated, and may not run ahead.
        await store.compact(revision)
        await store.compact(revision)
        await store.compact(revision - 1)
        with pytest.raises(StoreRefused):
            await store.compact(revision + 1000)
        await put(store, p + "quiet/1")
        await follower.count(1)
    assert follower.seen() == [("put", p + "quiet/1", b"")]


async def test_a_watch_beyond_the_stores_revision_is_another_stores(
    store: Store, backend: Backend
) -> None:
    revision = await put(store, backend.prefix + "k")
    with pytest.raises(Compacted):
        async with following(store, backend.prefix, revision + 100) as follower:
            await follower.count(1)
    with pytest.raises(ValueError, match="revision"):
        async with following(store, backend.prefix, 0) as follower:
            await follower.count(1)


async def test_close_ends_a_waiting_watch_and_refuses_later_calls(backend: Backend) -> None:
    store = backend.connect()
    revision = await put(store, backend.prefix + "k")
    started = asyncio.Event()

    async def follow() -> None:
        async for _ in store.watch(backend.prefix, revision):
            started.set()

    task = asyncio.create_task(follow())
    async with asyncio.timeout(150):
        await started.wait()
        await store.close()
        await task
    with pytest.raises(StoreUnavailable):
        await store.range(backend.prefix)
    with pytest.raises(StoreUnavailable):
        await store.txn([], [Put(backend.prefix + "k", b"")])
    await store.close()


async def test_a_cancelled_watch_is_cancelled(store: Store, backend: Backend) -> None:
    revision = await put(store, backend.prefix + "k")

    async def follow() -> None:
        async for _ in store.watch(backend.prefix, revision + 1):
            pass

    task = asyncio.create_task(follow())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await follow()
