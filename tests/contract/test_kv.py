# SPDX-License-Identifier: Apache-2.0
"""Launchers' keys: native semantics, several sidecars, lost requests and lost answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from itertools import count
from random import Random
from typing import Any, NamedTuple

import pytest

from launcher_shim.c10d.values.cell import NotANumber, read_number
from launcher_shim.c10d.values.operations import Kv
from launcher_shim.c10d.values.reads import ANSWER_MAX, ANSWERS_MAX
from launcher_shim.c10d.values.transactions import (
    BATCH_MAX,
    MAX_VALUE_BYTES,
    READS_MAX,
    RETRY_PAUSE_S,
    Stamp,
)
from launcher_shim.tcpstore import wire
from rdzv.errors import WireError
from rdzv.job import JobClient, Registered
from rdzv.store import Compare, Operation, Put, TxnResult, WatchEvent
from rdzv.store.memory.client import Faults, MemoryEngine, MemoryStore
from tests.support.clocks.virtual import now
from tests.support.sidecars.jobs import KEYS, Unreliable, client, past_faults
from tests.support.sidecars.processes import until
from tests.support.store.cut import Cut

pytestmark = pytest.mark.virtual

HERE = KEYS.in_generation(1)
RUN = HERE.run("digits")

NEVER = asyncio.Event().wait
"""No registration that was lost comes back."""

_leases = count(1)


async def kv_of(one: JobClient) -> Kv:
    """The keys of a member that is registered."""
    lease, store = next(_leases), past_faults(one)
    member_key = HERE.member(f"w-{lease}")
    await store.lease_grant(lease, 600)
    await store.txn([], [Put(member_key, b"{}", lease)])
    return Kv(RUN, one.mirror, one.store, Registered(member_key, lambda: lease, NEVER))


async def read(kv: Kv, key: bytes) -> bytes | None:
    """The value as the store has it."""
    return (await kv._transactions.read([key]))[key].value()


_puts = count(1)


def put(kv: Kv, items: Sequence[tuple[bytes, bytes]]) -> Awaitable[None]:
    """Set by a client of its own."""
    return kv.writes.put(items, Stamp(f"put{next(_puts)}", 1))


def stamps(author: str) -> Iterator[Stamp]:
    """One client's requests, in order."""
    return (Stamp(author, number) for number in count(1))


@asynccontextmanager
async def sidecars(*faults: Faults | None) -> AsyncIterator[list[Kv]]:
    engine = MemoryEngine(now)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client(engine, fault)) for fault in faults]
        yield [await kv_of(one) for one in clients]


async def soon(kv: Kv, key: bytes, value: bytes | None) -> None:
    """Wait until the watch has brought ``value`` to another sidecar's cache."""
    while kv.cells.value(key) != value:
        await kv._mirror.changed_after(kv._mirror.sequence)


class Counted(Faults):
    """Counts transactions."""

    txns = 0

    async def before(self, call: str) -> None:
        self.txns += call == "txn"


async def until_asked(counted: Counted, times: int) -> None:
    await until(lambda: counted.txns >= times)


async def test_a_whole_answer_is_kept_until_anything_changes_or_may_not_be_told() -> None:
    both, get = b"wait and get", b"get"
    reads: list[wire.Request] = [wire.Wait((b"/a", b"/b")), wire.Get(b"/a")]

    def kept(kv: Kv) -> dict[bytes, bytes]:
        kv.reads.keep_answer(both, reads)
        kv.reads.keep_answer(get, reads[1:])
        return dict(kv.answers.by_request)

    async with sidecars(None, None) as (one, two):
        assert kept(one) == {}
        await put(one, [(b"/a", b"1")])
        await one._mirror.reached((await one._store.status()).revision)
        assert kept(one) == {get: wire.vec(b"1")}
        await put(two, [(b"/b", b"2")])
        await soon(one, b"/b", b"2")
        assert one.answers.by_request == {}
        whole = {both: wire.STOP_WAITING + wire.vec(b"1"), get: wire.vec(b"1")}
        assert kept(one) == whole
        one._floor.raise_to(one._mirror.revision)
        assert one.answers.by_request == whole
        one._floor.raise_to(one._mirror.revision + 1)
        assert one.answers.by_request == {}
        assert kept(one) == {}  # somebody was told of what the mirror does not show yet
        await put(two, [(b"/a", b"3")])
        await soon(one, b"/a", b"3")
        assert kept(one) == {both: wire.STOP_WAITING + wire.vec(b"3"), get: wire.vec(b"3")}
        one.close()
        assert kept(one) == {}


async def test_answers_that_are_kept_are_bounded() -> None:
    async with sidecars(None) as (kv,):
        await put(kv, [(b"/a", b"1"), (b"/large", b"v" * ANSWER_MAX)])
        await kv._mirror.reached((await kv._store.status()).revision)
        for number in range(ANSWERS_MAX + 1):
            kv.reads.keep_answer(b"%d" % number, [wire.Get(b"/a")])
            assert len(kv.answers.by_request) <= ANSWERS_MAX
        kv.reads.keep_answer(b"large", [wire.Get(b"/large")])
        kv.reads.keep_answer(b"set", [wire.Set(b"/a", b"2")])
        assert not {b"large", b"set"} & kv.answers.by_request.keys()


async def test_more_is_set_at_once_than_one_transaction_of_etcd_takes() -> None:
    many = [(b"/rank/%d" % n, b"%d" % n) for n in range(300)]
    large = [(b"/large/%d" % n, b"v" * MAX_VALUE_BYTES) for n in range(2)]
    async with sidecars(None, None) as (one, two):
        await put(one, [*many, *large])
        assert await read(two, b"/rank/299") == b"299"
        assert await read(two, b"/large/1") == b"v" * MAX_VALUE_BYTES


@pytest.mark.parametrize(
    ("stored", "expected", "desired", "answer", "after"),
    [
        (None, b"", b"new", b"new", b"new"),
        (None, b"x", b"new", b"x", None),
        (b"v", b"v", b"new", b"new", b"new"),
        (b"", b"", b"new", b"new", b"new"),
        (b"v", b"x", b"new", b"v", b"v"),
        (b"v", b"", b"new", b"v", b"v"),
    ],
)
async def test_compare_set_answers_as_the_native_server_does(
    stored: bytes | None, expected: bytes, desired: bytes, answer: bytes, after: bytes | None
) -> None:
    async with sidecars(None) as (kv,):
        if stored is not None:
            await put(kv, [(b"/k", stored)])
        assert await kv.writes.compare_set(b"/k", expected, desired, Stamp("s", 1)) == answer
        assert await read(kv, b"/k") == after


async def test_a_counter_is_a_decimal_value_of_64_bits_that_can_be_set_read_and_deleted() -> None:
    async with sidecars(None, None) as (one, two):
        a, b = stamps("a"), stamps("b")
        await put(one, [(b"/n", b"  12abc")])
        assert await one.counters.add(b"/n", 1, next(a)) == 13
        assert await two.counters.add(b"/n", 5, next(b)) == 18
        assert await one.counters.add(b"/n", -20, next(a)) == -2
        assert await read(two, b"/n") == b"-2"
        await put(two, [(b"/n", b"7")])
        assert await one.counters.add(b"/n", 1, next(a)) == 8
        assert await one.writes.delete(b"/n", next(a)) is True
        assert await two.writes.delete(b"/n", next(b)) is False
        assert await two.counters.add(b"/n", 3, next(b)) == 3
        await put(one, [(b"/n", b"9223372036854775807"), (b"/word", b"word")])
        assert await one.counters.add(b"/n", 1, next(a)) == -(2**63)
        with pytest.raises(NotANumber):
            await one.counters.add(b"/word", 1, next(a))


async def test_a_wait_ends_when_the_last_key_has_come_from_another_sidecar() -> None:
    async with sidecars(None, None) as (one, two):
        waiting = asyncio.create_task(one.reads.wait([b"/x", b"/y", b"/x"]))
        await put(two, [(b"/x", b"1")])
        await soon(one, b"/x", b"1")
        assert not waiting.done()
        await two.counters.add(b"/y", 1, Stamp("t", 1))
        await waiting


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    async with sidecars(None) as (kv,):
        waiting = asyncio.create_task(kv.reads.wait([b"/x"]))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await put(kv, [(b"/x", b"1")])
        assert await kv.reads.check([b"/x"])
        assert len(kv._waiters) == 0


class Held(Counted):
    """Keeps calls back from the transaction of number ``first`` on, until ``passing`` is set."""

    def __init__(self, first: int = 1) -> None:
        self.held, self.passing = asyncio.Event(), asyncio.Event()
        self._first = first

    async def before(self, call: str) -> None:
        await super().before(call)
        if self.txns >= self._first:
            self.held.set()
            await self.passing.wait()


@contextmanager
def behind(kv: Kv, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hold the watch of a sidecar back; in the end all of it comes in one batch."""
    events: list[WatchEvent] = []
    revision = kv._mirror.revision

    def hold(news: Sequence[WatchEvent], reached: int) -> None:
        nonlocal revision
        events.extend(news)
        revision = reached

    with monkeypatch.context() as held:
        held.setattr(kv._mirror, "apply", hold)
        yield
    kv._mirror.apply(events, revision)


async def present(kv: Kv) -> None:
    """Wait until a sidecar shows all that has happened."""
    await kv._mirror.reached((await kv._store.status()).revision)


async def test_a_barrier_ends_though_its_counter_is_gone_when_its_last_arrival_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with sidecars(None, None) as (one, two):
        arriving = stamps("others")
        await two.counters.add(b"/barrier", 1, next(arriving))
        waiting = asyncio.create_task(one.counters.count_reached(b"/barrier", 2))
        await present(one)
        with behind(one, monkeypatch):
            await two.counters.add(b"/barrier", 1, next(arriving))
            await two.writes.delete(b"/barrier", next(arriving))
            await present(two)
        await waiting
        assert len(one._waiters) == 0


async def see_a_later_sum(kv: Kv) -> None:
    """Where the history of an addition is compacted its sum is that of later."""
    await kv._store.compact((await kv._store.status()).revision)
    assert await kv.counters._sum_at(b"/n", kv._mirror.revision) == 2


@pytest.mark.parametrize(
    "see",
    [
        pytest.param(lambda kv: kv.reads.check([b"/queue"]), id="check"),
        pytest.param(lambda kv: kv.reads.wait([b"/queue"]), id="wait"),
        pytest.param(lambda kv: kv.queues.length(b"/queue"), id="length"),
        pytest.param(lambda kv: kv.queues.length(b"/emptied"), id="emptied"),
        see_a_later_sum,
    ],
)
async def test_who_has_seen_what_is_new_is_told_nothing_from_before(
    see: Callable[[Kv], Awaitable[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sidecars(None, None) as (one, two):
        other = stamps("other")
        await put(two, [(b"/a", b"old")])
        await two.queues.push(b"/emptied", b"1", next(other))
        await two.counters.add(b"/n", 1, next(other))
        await present(one)
        with behind(one, monkeypatch):
            await put(two, [(b"/a", b"new")])
            await two.queues.push(b"/queue", b"1", next(other))
            await two.queues.pop(b"/emptied", next(other))
            await two.counters.add(b"/n", 1, next(other))
            await see(one)
            assert await one.reads.get_all([b"/a"]) == [b"new"]


async def test_many_missing_keys_are_looked_for_in_one_read() -> None:
    counted, many = Counted(), [b"/rank/%d" % n for n in range(READS_MAX)]
    async with sidecars(counted) as (kv,):
        assert not await kv.reads.check(many)
        assert counted.txns == 1
        assert await kv.reads.get_all(many) == [None] * READS_MAX
        assert counted.txns == 2
        waiting = asyncio.create_task(kv.reads.wait(many))
        await asyncio.sleep(0)
        await put(kv, [(key, b"v") for key in many])
        await waiting
        # One of the wait, and those of the writes.
        assert counted.txns == 3 + -(-READS_MAX // BATCH_MAX)


async def test_more_keys_are_looked_for_than_one_transaction_of_etcd_takes() -> None:
    many = [b"/rank/%d" % n for n in range(5 * READS_MAX)]
    counted = Counted()
    async with sidecars(counted, None) as (kv, other):
        kv.cells.close()  # the watch brings nothing
        await put(other, [(key, b"v" + key) for key in many[1:]])
        assert await kv.reads.get_all(many) == [None, *(b"v" + key for key in many[1:])]
        assert counted.txns == 5


@pytest.mark.parametrize(
    ("reading", "answer"),
    [
        (lambda kv: kv.reads.wait([b"/x", b"/y"]), None),
        (lambda kv: kv.reads.check([b"/x", b"/y"]), True),
        (lambda kv: kv.reads.get_all([b"/x", b"/y"]), [b"1", b"2"]),
    ],
    ids=["wait", "check", "values"],
)
async def test_a_read_is_answered_by_the_watch_while_the_store_is_still_to_answer(
    reading: Callable[[Kv], Awaitable[object]], answer: object
) -> None:
    held = Held()
    async with sidecars(held, None) as (kv, other):
        asked = asyncio.ensure_future(reading(kv))
        await held.held.wait()
        await put(other, [(b"/x", b"1"), (b"/y", b"2")])
        assert await asked == answer
        assert len(kv._waiters) == 0
        held.passing.set()


async def test_a_check_of_a_queue_takes_no_push_from_who_waits_for_it() -> None:
    held = Held()
    async with sidecars(held, None) as (kv, other):
        checking = asyncio.create_task(kv.reads.check([b"/q"]))
        await held.held.wait()
        waiting = asyncio.create_task(kv.reads.wait([b"/q"]))
        await asyncio.sleep(0)
        await other.queues.push(b"/q", b"e", Stamp("a", 1))
        assert await checking
        await waiting
        held.passing.set()


async def test_a_push_wakes_one_waiter_the_one_that_came_first() -> None:
    counted = Counted()
    async with sidecars(counted) as (kv,):
        first = asyncio.create_task(kv.reads.wait([b"/q"]))
        second = asyncio.create_task(kv.reads.wait([b"/q"]))
        await until_asked(counted, 2)
        assert await read(kv, b"/q") is None  # so that both have looked, too
        await kv.queues.push(b"/q", b"1", Stamp("a", 1))
        await first
        assert await kv.queues.length(b"/q") == 1
        assert not second.done()
        await kv.queues.push(b"/q", b"2", Stamp("a", 2))
        await second


async def test_a_push_counts_for_those_that_wait_for_more_and_wakes_the_next() -> None:
    counted = Counted()
    async with sidecars(counted) as (kv,):
        both = asyncio.create_task(kv.reads.wait([b"/q", b"/x"]))
        one = asyncio.create_task(kv.reads.wait([b"/q"]))
        await until_asked(counted, 2)
        assert await read(kv, b"/q") is None
        await kv.queues.push(b"/q", b"1", Stamp("a", 1))
        await one
        assert not both.done()
        await put(kv, [(b"/x", b"1")])
        await both
        assert len(kv._waiters) == 0


async def test_queues_give_each_element_once_in_order() -> None:
    async with sidecars(None, None) as (one, two):
        a, b = stamps("a"), stamps("b")
        for n in range(6):
            await (one if n % 2 else two).queues.push(b"/q", b"%d" % n, next(a if n % 2 else b))
        assert await one.reads.check([b"/q"])
        assert await one.queues.length(b"/q") == 6
        popped = [
            await (one if n % 3 else two).queues.pop(b"/q", next(a if n % 3 else b))
            for n in range(6)
        ]
        assert popped == [(6 - n, b"%d" % n) for n in range(6)]
        assert await two.queues.pop(b"/q", next(b)) == (0, b"")
        assert not await two.reads.check([b"/q"])


async def test_a_queue_is_deleted_that_is_one_in_the_store_and_not_in_the_watch() -> None:
    async with sidecars(None, None) as (one, two):
        a, b = stamps("a"), stamps("b")
        await one.queues.push(b"/emptied", b"e", next(a))
        one.cells.close()  # the watch does not bring what follows
        await two.queues.push(b"/q", b"e", next(b))
        assert await two.queues.pop(b"/emptied", next(b)) == (1, b"e")
        assert await one.writes.delete(b"/q", next(a)) is True
        assert await two.queues.length(b"/q") == 0
        assert await one.writes.delete(b"/q", next(a)) is False
        assert await one.writes.delete(b"/emptied", next(a)) is False


class Sent(NamedTuple):
    """A transaction: how much it compares, how much it reads if that does not hold, its answer."""

    compares: int
    otherwise: int
    result: TxnResult


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Sent]:
    """All transactions, in order."""
    done: list[Sent] = []
    txn = MemoryStore.txn

    async def noted(
        store: MemoryStore,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> TxnResult:
        result = await txn(store, compares, then, otherwise)
        done.append(Sent(len(compares), len(otherwise), result))
        return result

    monkeypatch.setattr(MemoryStore, "txn", noted)
    return done


async def test_hundred_adders_at_once_need_one_transaction_each_and_read_nothing(
    sent: list[Sent],
) -> None:
    async with sidecars(*[None] * 10) as kvs:
        revision = (await kvs[0]._store.status()).revision
        sent.clear()
        sums = await asyncio.gather(
            *(
                kv.counters.add(b"/n", 1, Stamp(f"{n}.{m}", 1))
                for n, kv in enumerate(kvs)
                for m in range(10)
            )
        )
        assert sorted(sums) == list(range(1, 101))
        assert (await kvs[0]._store.status()).revision - revision == 100
        found = [part for one in sent for part in one.result.responses if isinstance(part, tuple)]
        assert not any(found)


async def test_why_a_write_does_not_fit_is_asked_for_only_where_it_does_not(
    sent: list[Sent],
) -> None:
    async with sidecars(None, None) as (one, two):
        sent.clear()
        a, b = stamps("a"), stamps("b")
        await one.writes.put([(b"/k", b"1")], next(a))
        await one.writes.compare_set(b"/k", b"1", b"2", next(a))
        await one.counters.add(b"/n", 1, next(a))
        await one.writes.delete(b"/n", next(a))
        assert [each.otherwise for each in sent] == [0, 0, 0, 0]
        one.cells.close()  # the watch brings nothing
        await two.writes.put([(b"/k", b"3")], next(b))
        sent.clear()
        assert await one.writes.compare_set(b"/k", b"3", b"4", next(a)) == b"4"
        # It was refused by what is known, which does not hold; read; and carried out.
        assert [(each.compares > 0, each.otherwise) for each in sent] == [
            (True, 0),
            (False, 0),
            (True, 5),
        ]


async def test_an_addition_whose_event_does_not_come_is_read_in_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("launcher_shim.c10d.values.operations.SEE_SUM_S", 0.01)
    async with sidecars(None, None) as (one, two):
        one.cells.close()  # the watch brings nothing
        assert await two.counters.add(b"/n", 5, Stamp("b", 1)) == 5
        assert await one.counters.add(b"/n", 1, Stamp("a", 1)) == 6
        assert await two.counters.add(b"/n", 5, Stamp("b", 2)) == 11
        assert await one.counters.add(b"/n", 1, Stamp("a", 2)) == 12


async def test_what_is_read_anew_does_not_tell_what_an_addition_came_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of what happened meanwhile it shows the end."""
    monkeypatch.setattr("launcher_shim.c10d.values.operations.SEE_SUM_S", 3600.0)
    async with client(MemoryEngine(now)) as one:
        kv, direct = await kv_of(one), past_faults(one)
        others = Kv(RUN, one.mirror, direct, kv._transactions._registered)
        kv.cells.close()
        adding = asyncio.create_task(kv.counters.add(b"/n", 1, Stamp("a", 1)))
        await until(lambda: others.cells.value(b"/n") is not None)
        assert await others.counters.add(b"/n", 5, Stamp("b", 1)) == 6
        read = await direct.range(RUN.prefix, prefix=True)
        one.mirror.relists += 1
        kv.cells._apply([WatchEvent("put", found) for found in reversed(read.kvs)])
        async with asyncio.timeout(5):
            assert await adding == 1


@pytest.mark.parametrize("seed", range(8))
async def test_nothing_is_applied_twice_or_lost_when_answers_are(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher_shim.c10d.values.transactions.RETRY_PAUSE_S", 0.001)
    faults = [Unreliable(seed * 10 + n, 0.3) for n in range(3)]
    random = Random(seed)
    async with sidecars(*faults) as kvs:
        authors = [stamps(f"s{n}") for n in range(3)]
        deltas = [random.randint(-5, 5) for _ in range(45)]
        popped: list[bytes] = []

        async def work(n: int) -> None:
            for i in range(n, 45, 3):
                await kvs[n].counters.add(b"/n", deltas[i], next(authors[n]))
                await kvs[n].writes.append(b"/log", b"[%d]" % i, next(authors[n]))
                await kvs[n].queues.push(b"/q", b"%d" % i, next(authors[n]))
                if i % 2:
                    popped.append((await kvs[n].queues.pop(b"/q", next(authors[n])))[1])
                value = b"%d" % i
                while True:
                    seen = kvs[n].cells.value(b"/chain") or b""
                    if (
                        await kvs[n].writes.compare_set(
                            b"/chain", seen, seen + b"." + value, next(authors[n])
                        )
                        == seen + b"." + value
                    ):
                        break

        await asyncio.gather(*(work(n) for n in range(3)))
        assert read_number(await read(kvs[0], b"/n") or b"") == sum(deltas)
        log = (await read(kvs[1], b"/log") or b"").decode()
        chain = (await read(kvs[2], b"/chain") or b"").decode()
        while (rest := await kvs[0].queues.pop(b"/q", next(authors[0])))[0]:
            popped.append(rest[1])
    numbers = sorted(range(45))
    assert sorted(int(part) for part in log.strip("[]").split("][")) == numbers
    assert sorted(int(part) for part in chain.strip(".").split(".")) == numbers
    assert sorted(int(part) for part in popped if part) == numbers


async def test_i5_known_keys_are_answered_and_writes_wait_while_the_store_is_away() -> None:
    cut = Cut()
    async with sidecars(cut) as (kv,):
        await put(kv, [(b"/known", b"1")])
        cut.cut()
        assert kv.cells.value(b"/known") == b"1"
        assert await kv.reads.check([b"/known"])
        async with asyncio.timeout(1):
            await kv.reads.wait([b"/known"])
        writing = asyncio.ensure_future(put(kv, [(b"/late", b"2")]))
        done, _ = await asyncio.wait([writing], timeout=0.5)
        assert not done
        cut.mend()
        await writing
        assert await read(kv, b"/late") == b"2"


@pytest.mark.parametrize(
    ("forget", "gone", "kept"),
    [
        pytest.param(
            lambda kv: kv.forget(b"/r.JOB.1/"),
            [b"/r.JOB.1/a"],
            [b"/r.JOB.10/a", b"/r.JOB.2/a"],
            id="an old round",
        ),
        pytest.param(
            lambda kv: kv.forget_others(b"/r.JOB.", b"/r.JOB.12/"),
            [b"/r.JOB.1/a", b"/r.JOB.3/b/c"],
            [b"/r.JOB.12/a", b"/r.JOB2/1/a", b"/r.JOB.odd"],
            id="all worlds but the present one",
        ),
    ],
)
async def test_old_keys_are_dropped_and_nothing_else(
    forget: Callable[[Kv], Awaitable[None]], gone: list[bytes], kept: list[bytes]
) -> None:
    async with sidecars(None, None) as (one, two):
        await put(one, [(key, b"1") for key in (*gone, *kept)])
        await one.counters.add(b"/r.JOB.1/n", 1, Stamp("s", 1))
        await one.queues.push(b"/r.JOB.1/q", b"e", Stamp("t", 1))
        await soon(two, b"/r.JOB.1/n", b"1")
        await forget(one)
        await soon(two, gone[-1], None)
        assert sorted(two.cells.existing()) == sorted(kept)
        assert not await two.reads.check([b"/r.JOB.1/q"])


async def test_a_store_that_was_emptied_is_believed() -> None:
    async with client(MemoryEngine(now)) as one:
        kv = await kv_of(one)
        await put(kv, [(b"/old", b"1")])
        await one.mirror.changed_after(one.mirror.sequence)
        one.mirror.replace([], 1)
        assert kv.cells.value(b"/old") is None
        assert list(kv.cells.existing()) == []


async def test_a_value_beyond_the_stores_limit_is_refused_with_the_number() -> None:
    async with sidecars(None) as (kv,):
        with pytest.raises(WireError, match=str(MAX_VALUE_BYTES)):
            await put(kv, [(b"/big", bytes(MAX_VALUE_BYTES + 1))])


async def test_the_record_of_an_operation_outlives_the_lease_of_its_sidecar() -> None:
    async with client(MemoryEngine(now)) as one:
        kv = await kv_of(one)
        await kv.writes.append(b"/log", b"x", Stamp("a", 1))
        records = (await one.store.range(RUN.operations, prefix=True)).kvs
        assert [(record.value.partition(b" ")[0], record.lease) for record in records] == [
            (b"1", 0)
        ]
        await kv.forget_author("a")
        assert (await one.store.range(RUN.operations, prefix=True)).kvs == ()


async def test_what_a_killed_sidecar_left_on_record_goes_with_the_next_one() -> None:
    async with client(MemoryEngine(now)) as one:
        kv = await kv_of(one)
        direct, relayed = "w-0.0123456789ab.1", f"w-0.{'0' * 32}"
        others = [f"{direct}:7", relayed, "w-00.0123456789ab.1", "w-1.0123456789ab.1"]
        for author in (direct, *others):
            await kv.writes.append(b"/log", b"x", Stamp(author, 1))
        last = (await one.store.status()).revision
        await one.mirror.reached(last)
        await kv.forget_records(kv.left_behind("w-0"))
        left = (await one.store.range(RUN.operations, prefix=True)).kvs
        assert {record.key for record in left} == {RUN.operation(each) for each in others[1:]}


@pytest.mark.parametrize(("lease", "asked"), [(None, (0, 0)), (7, (1, 5))])
async def test_what_waits_for_the_registration_does_not_press_the_store(
    lease: int | None, asked: tuple[int, int]
) -> None:
    counted = Counted()
    async with client(MemoryEngine(now), counted) as one:
        kv = Kv(RUN, one.mirror, one.store, Registered(HERE.member("w-0"), lambda: lease, NEVER))
        writing = asyncio.ensure_future(put(kv, [(b"/k", b"v")]))
        done, _ = await asyncio.wait([writing], timeout=2.5 * RETRY_PAUSE_S)
        assert not done
        assert counted.txns <= asked[1]
        await until_asked(counted, asked[0])
        writing.cancel()


async def test_a_later_batch_that_waits_for_the_registration_does_not_press_the_store() -> None:
    """The record of an earlier batch has the number of the request, too."""
    counted, lease, member_key = Held(2), next(_leases), HERE.member("w-0")
    async with client(MemoryEngine(now), counted) as one:
        store = past_faults(one)
        await store.lease_grant(lease, 600)
        await store.txn([], [Put(member_key, b"{}", lease)])
        kv = Kv(RUN, one.mirror, one.store, Registered(member_key, lambda: lease, NEVER))
        many = [(b"/rank/%d" % n, b"v") for n in range(BATCH_MAX + 1)]
        writing = asyncio.ensure_future(put(kv, many))
        await counted.held.wait()
        await store.lease_revoke(lease)
        counted.passing.set()
        done, _ = await asyncio.wait([writing], timeout=2.5 * RETRY_PAUSE_S)
        assert not done
        assert counted.txns <= 7
        await until_asked(counted, 3)
        await store.lease_grant(lease, 600)
        await store.txn([], [Put(member_key, b"{}", lease)])
        await writing
        assert kv.cells.value(many[-1][0]) == b"v"
