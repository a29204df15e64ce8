# SPDX-License-Identifier: Apache-2.0
"""The contract of every store driver: watches."""

from __future__ import annotations

import asyncio
import time

import pytest

from rdzv.errors import Compacted, StoreRefused, StoreUnavailable
from rdzv.store import WATCH_PROGRESS_S, Delete, Put, Store, WatchEvent
from tests.support.clocks.calm import calmly
from tests.support.store.backend import Backend, following


async def put(store: Store, key: str, value: bytes = b"") -> int:
    return (await store.txn([], [Put(key, value)])).revision


async def test_a_watch_delivers_what_happens_once_and_in_order(
    store: Store, backend: Backend
) -> None:
    p = backend.prefix + "a/"
    start = (await store.range(p, prefix=True)).revision + 1
    async with following(store, p, start) as follower:
        first = await put(store, p + "1", b"x")
        await put(store, backend.prefix + "a0", b"outside")
        await put(store, backend.prefix + "a", b"outside")
        await put(store, p + "1", b"y")
        await store.txn([], [Delete(p + "1"), Put(p + "2", b"z")])
        await follower.count(4)
    assert follower.seen() == [
        ("put", p + "1", b"x"),
        ("put", p + "1", b"y"),
        ("delete", p + "1", b""),
        ("put", p + "2", b"z"),
    ]
    last = first + 4
    revisions = [event.kv.mod_revision for event in follower.events]
    assert revisions == [first, first + 3, last, last]
    created, changed, deleted, _ = (event.kv for event in follower.events)
    assert (created.create_revision, created.version) == (first, 1)
    assert (changed.create_revision, changed.version) == (first, 2)
    assert (deleted.create_revision, deleted.version, deleted.lease) == (0, 0, 0)
    assert follower.batches[-1].revision >= last
    for batch in follower.batches:
        assert all(event.kv.mod_revision <= batch.revision for event in batch.events)


async def test_a_watch_starts_in_the_past_and_goes_on(store: Store, backend: Backend) -> None:
    p = backend.prefix
    revisions = [await put(store, p + "k", b"%d" % number) for number in range(10)]
    async with following(store, p, revisions[4]) as follower:
        await follower.count(6)
        await put(store, p + "k", b"10")
        await follower.count(7)
    assert [event.kv.value for event in follower.events] == [b"%d" % n for n in range(4, 11)]


async def test_an_idle_watch_shows_that_it_lives(store: Store, backend: Backend) -> None:
    async def idle(attempt: int) -> None:
        prefix = f"{backend.prefix}{attempt}/"
        revision = await put(store, prefix + "k")
        async with following(store, prefix, revision + 1) as follower:
            started_s = time.monotonic()
            await follower.until(
                lambda: len(follower.batches) >= 3, deadline_s=6 * WATCH_PROGRESS_S
            )
            took_s = time.monotonic() - started_s
        assert follower.events == []
        # The tests may share a small machine: the promised interval, with three quarters to spare.
        assert took_s < 3 * 1.75 * WATCH_PROGRESS_S
        assert took_s > WATCH_PROGRESS_S
        assert all(batch.revision >= revision for batch in follower.batches)

    await calmly(idle)


async def test_signs_of_life_follow_the_stores_revision(store: Store, backend: Backend) -> None:
    revision = await put(store, backend.prefix + "k")
    async with following(store, backend.prefix + "quiet/", revision + 1) as follower:
        for _ in range(5):
            revision = await put(store, backend.prefix + "k")
        await follower.until(
            lambda: bool(follower.batches) and follower.batches[-1].revision >= revision
        )
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
            await follower.until(lambda: len(follower.events) >= 500, deadline_s=45)
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


async def test_one_transaction_comes_whole(store: Store, backend: Backend) -> None:
    p = backend.prefix
    result = await store.txn([], [Put(f"{p}{number:03}", b"x" * 60_000) for number in range(20)])
    async with following(store, p, result.revision) as follower:
        await follower.count(20)
    (batch,) = (batch for batch in follower.batches if batch.events)
    assert batch.revision == result.revision
    assert [event.kv.key for event in batch.events] == [f"{p}{number:03}" for number in range(20)]


async def test_a_revision_is_never_split_however_much_there_is(backend: Backend) -> None:
    store = backend.connect()
    p = backend.prefix
    revisions = []
    for _ in range(30):
        puts = [Put(f"{p}{number}", b"x" * 12_000) for number in range(10)]
        revisions.append((await store.txn([], puts)).revision)
    async with following(store, p, revisions[0]) as follower:
        await follower.count(300)
    parts = [
        revision
        for batch in follower.batches
        for revision in sorted({event.kv.mod_revision for event in batch.events})
    ]
    assert parts == revisions


async def test_a_long_history_comes_whole(backend: Backend) -> None:
    store = backend.connect()
    p, total = backend.prefix, 2500

    async def write(worker: int) -> list[int]:
        return [await put(store, f"{p}{worker}") for _ in range(total // 25)]

    written = await asyncio.gather(*map(write, range(25)))
    revisions = sorted(revision for part in written for revision in part)
    async with following(store, p, revisions[0]) as follower:
        await follower.count(total, deadline_s=40)
    assert [event.kv.mod_revision for event in follower.events] == revisions


async def test_a_watch_from_before_the_compaction_says_so(store: Store, backend: Backend) -> None:
    p = backend.prefix
    revisions = [await put(store, p + "k", b"%d" % number) for number in range(10)]
    await store.compact(revisions[5])
    with pytest.raises(Compacted) as gone:
        async with following(store, p, revisions[4]) as follower:
            await follower.count(1)
    assert gone.value.compact_revision == revisions[5]


async def test_the_compacted_revision_itself_can_be_watched(store: Store, backend: Backend) -> None:
    p = backend.prefix
    await put(store, p + "k", b"1")
    await put(store, p + "other", b"2")
    deleted = (await store.txn([], [Delete(p + "k")])).revision
    await put(store, p + "k", b"3")
    await store.compact(deleted)
    async with following(store, p, deleted) as follower:
        await follower.count(2)
    assert follower.seen() == [("delete", p + "k", b""), ("put", p + "k", b"3")]
    kvs = (await store.range(p, prefix=True)).kvs
    assert [(kv.key, kv.value) for kv in kvs] == [(p + "k", b"3"), (p + "other", b"2")]


async def test_a_compaction_does_not_disturb_a_watch_that_keeps_up(
    store: Store, backend: Backend
) -> None:
    p = backend.prefix
    start = (await store.range(p)).revision + 1
    async with following(store, p + "quiet/", start) as follower:
        await follower.until(lambda: len(follower.batches) >= 1)
        for _ in range(20):
            revision = await put(store, p + "k")
        await store.compact(revision)
        await put(store, p + "quiet/1")
        await follower.count(1)
    assert follower.seen() == [("put", p + "quiet/1", b"")]


async def test_compactions_may_be_repeated_but_not_run_ahead(
    store: Store, backend: Backend
) -> None:
    revision = await put(store, backend.prefix + "k")
    await store.compact(revision)
    await store.compact(revision)
    await store.compact(revision - 1)
    with pytest.raises(StoreRefused):
        await store.compact(revision + 1000)


async def test_a_watch_beyond_the_stores_revision_is_another_stores(
    store: Store, backend: Backend
) -> None:
    revision = await put(store, backend.prefix + "k")
    with pytest.raises(Compacted):
        async with following(store, backend.prefix, revision + 100) as follower:
            await follower.count(1)


async def test_a_watch_starts_at_a_revision(store: Store, backend: Backend) -> None:
    with pytest.raises(ValueError, match="revision"):
        async with following(store, backend.prefix, 0) as follower:
            await follower.count(1)


async def test_watches_are_independent(store: Store, backend: Backend) -> None:
    p = backend.prefix
    start = (await store.range(p)).revision + 1
    async with following(store, p + "a/", start) as a, following(store, p + "b/", start) as b:
        await put(store, p + "a/1")
        await put(store, p + "b/1")
        await a.count(1)
        await b.count(1)
        slow_a: list[WatchEvent] = list(a.events)
        for number in range(2, 50):
            await put(store, f"{p}b/{number}")
        await b.count(49)
        assert a.events == slow_a
        await put(store, p + "a/2")
        await a.count(2)
    assert [event.kv.key for event in a.events] == [p + "a/1", p + "a/2"]
    assert len(b.events) == 49


async def test_close_ends_a_waiting_watch_and_refuses_later_calls(backend: Backend) -> None:
    store = backend.connect()
    revision = await put(store, backend.prefix + "k")
    started = asyncio.Event()

    async def follow() -> None:
        async for _ in store.watch(backend.prefix, revision):
            started.set()

    task = asyncio.create_task(follow())
    async with asyncio.timeout(5):
        await started.wait()
    await store.close()
    async with asyncio.timeout(2):
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
