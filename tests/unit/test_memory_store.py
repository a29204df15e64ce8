# SPDX-License-Identifier: Apache-2.0
"""What only the memory store has: a clock moved by hand, fault hooks, bounds."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.errors import (
    Compacted,
    LeaseLost,
    StoreAmbiguous,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from rdzv.store import Compare, Delete, Operation, Put, Range, WatchEvent
from rdzv.store.interface import Interval, key_bytes, key_text
from rdzv.store.memory.actions import Erase, Read, Write
from rdzv.store.memory.client import Faults, MemoryEngine, MemoryStore
from rdzv.store.memory.engine import Watcher
from tests.support.clocks.hand import HandClock


async def test_a_lease_ends_when_the_hand_clock_says_so(clock: HandClock) -> None:
    store = MemoryStore(MemoryEngine(clock))
    await store.lease_grant(7, 10)
    await store.txn([], [Put("a", b"1", lease=7), Put("b", b"2", lease=7), Put("c", b"3")])
    clock.now_s += 9
    assert await store.lease_keep_alive(7) == 10
    clock.now_s += 9.9
    assert len((await store.range("", prefix=True)).kvs) == 3
    clock.now_s += 0.1
    left = await store.range("", prefix=True)
    assert [kv.key for kv in left.kvs] == ["c"]
    assert left.revision == 3
    with pytest.raises(LeaseLost):
        await store.lease_keep_alive(7)


async def test_a_lease_that_ends_wakes_a_watch(clock: HandClock) -> None:
    engine = MemoryEngine(clock)
    store = MemoryStore(engine)
    await store.lease_grant(7, 10)
    written = await store.txn([], [Put("a", b"1", lease=7)])
    async with aclosing(store.watch("a", written.revision + 1)) as batches:
        pending = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        engine.expire_leases(clock.now_s + 10)
        (event,) = (await pending).events
    assert (event.kind, event.kv.key, event.kv.mod_revision) == ("delete", "a", 3)


def test_renewed_leases_do_not_pile_up(clock: HandClock) -> None:
    engine = MemoryEngine(clock)
    engine.grant(1, 5)
    for _ in range(1000):
        clock.now_s += 3
        engine.keep_alive(1)
    assert len(engine.leases._queue) == 1


async def test_a_full_store_refuses_what_needs_space_and_does_all_else(clock: HandClock) -> None:
    engine = MemoryEngine(clock)
    store = MemoryStore(engine)
    await store.lease_grant(7, 10)
    await store.txn([], [Put("a", b"1", lease=7), Put("b", b"2"), Put("c", b"3")])
    engine.full = True
    never = Compare("a", "version", "=", 9)
    refused: list[tuple[list[Compare], list[Operation], list[Operation]]] = [
        ([], [Put("d", b"4")], []),
        ([never], [Put("d", b"4")], []),
        ([never], [Range("a")], [Put("d", b"4")]),
        ([], [Delete("b"), Put("d", b"4")], []),
    ]
    for compares, then, otherwise in refused:
        with pytest.raises(StoreFull, match="database space exceeded"):
            await store.txn(compares, then, otherwise)
    with pytest.raises(StoreFull):
        await store.lease_grant(8, 10)
    clock.now_s += 9
    assert await store.lease_keep_alive(7) == 10
    assert (await store.txn([], [Delete("b")], [Range("a")])).succeeded
    assert (await store.status()).errors == ("memberID:1 alarm:NOSPACE ",)
    clock.now_s += 10
    assert [kv.key for kv in (await store.range("", prefix=True)).kvs] == ["c"]
    engine.full = False
    assert (await store.txn([], [Put("d", b"4")])).succeeded
    assert (await store.status()).errors == ()


class Lossy(Faults):
    """Refuses calls, loses their answers, or lets these take longer than any call has."""

    what: Literal["", "refuses", "loses", "hangs"] = ""

    async def before(self, call: str) -> None:
        if self.what == "refuses":
            raise StoreUnavailable(call)

    async def after(self, call: str) -> None:
        if self.what == "loses":
            raise StoreAmbiguous(call)
        if self.what == "hangs":
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("what", "of_a_write"),
    [("refuses", StoreUnavailable), ("loses", StoreAmbiguous), ("hangs", StoreAmbiguous)],
)
async def test_faults_lose_calls_and_answers(
    what: Literal["refuses", "loses", "hangs"], of_a_write: type[StoreError]
) -> None:
    faults = Lossy()
    store = MemoryStore(faults=faults)
    faults.what = what
    with pytest.raises(of_a_write):
        await store.txn([], [Put("a", b"1")], timeout_s=0.01)
    with pytest.raises(StoreUnavailable):
        await store.range("a", timeout_s=0.01)
    faults.what = ""
    assert len((await store.range("a")).kvs) == store.engine.revision - 1 == (what != "refuses")


def test_a_slow_watcher_is_bounded_and_reads_the_history_again() -> None:
    engine = MemoryEngine()
    watcher = engine.watch(Interval.of("k", prefix=True), 1, lambda: None)
    assert watcher.take() == (1, ())
    total = Watcher.PENDING_LIMIT + 10
    for number in range(total):
        engine.txn([], [Write(b"k%d" % (number % 7), b"")])
        assert len(watcher._pending) <= Watcher.PENDING_LIMIT
    revision, events = watcher.take()
    assert revision == total + 1
    assert [event.kv.mod_revision for event in events] == list(range(2, total + 2))


def test_a_slow_watcher_learns_of_a_compaction() -> None:
    engine = MemoryEngine()
    watcher = engine.watch(Interval.of("k", prefix=True), 1, lambda: None)
    watcher.take()
    for _ in range(Watcher.PENDING_LIMIT + 1):
        engine.txn([], [Write(b"k", b"")])
    engine.compact(engine.revision)
    with pytest.raises(Compacted) as gone:
        watcher.take()
    assert gone.value.compact_revision == engine.revision


def test_the_history_is_bounded() -> None:
    engine = MemoryEngine(history_limit=100)
    for number in range(10_000):
        engine.txn([], [Write(b"k%d" % (number % 3), b"x" * 100)])
    total, in_use = engine.size_bytes
    assert in_use == 3 * 102
    assert total <= in_use + 101 * 102
    with pytest.raises(Compacted):
        engine.events(Interval(b"k0"), 1)


@given(st.binary(), st.binary())
def test_an_interval_of_a_prefix_holds_what_starts_with_it(prefix: bytes, key: bytes) -> None:
    interval = Interval.of(key_text(prefix), prefix=True)
    if key:
        assert interval.holds(key) == key.startswith(prefix)
        assert interval.holds(prefix + key)


@given(st.binary())
def test_every_key_survives_its_text_form(key: bytes) -> None:
    assert key_bytes(key_text(key)) == key


_keys = st.sampled_from([b"a", b"a/", b"a/1", b"a/2", b"a0", b"b"])
_actions = st.one_of(
    st.builds(Write, _keys, st.binary(max_size=2), st.sampled_from([0, 1, 2])),
    st.builds(Erase, st.builds(Interval, _keys)),
    st.just(Erase(Interval.of("a/", prefix=True))),
    st.just(Read(Interval.of("", prefix=True))),
)


@given(st.lists(st.lists(_actions, min_size=1, max_size=4), max_size=30), st.integers(0, 30))
def test_replaying_the_history_gives_the_state(
    txns: list[list[Write | Erase | Read]], revoke_at: int
) -> None:
    engine = MemoryEngine(lambda: 0.0)
    engine.grant(1, 10)
    engine.grant(2, 10)
    seen: list[WatchEvent] = []
    watcher = engine.watch(Interval.of("a/", prefix=True), 1, lambda: None)
    for index, actions in enumerate(txns):
        if index == revoke_at:
            engine.revoke(1)
        before = engine.revision
        try:
            engine.txn([], actions)
        except (StoreRefused, LeaseLost):
            assert engine.revision == before
        if index % 3 == 0:
            seen += watcher.take()[1]
    seen += watcher.take()[1]
    assert seen == engine.events(watcher.interval, 1)
    mirror = {}
    for event in engine.events(Interval.of("", prefix=True), 1):
        if event.kind == "put":
            mirror[event.kv.key] = event.kv
        else:
            del mirror[event.kv.key]
    state = engine.read(Interval.of("", prefix=True))
    assert list(state) == [mirror[key] for key in sorted(mirror)]
    hanging = {kv.key.encode() for kv in state if kv.lease == 2}
    assert engine.leases[2].keys == hanging
    assert engine.size_bytes[1] == sum(len(kv.key) + len(kv.value) for kv in state)
