# SPDX-License-Identifier: Apache-2.0
"""Every driver, given the same random calls, answers as the default one does on real etcd.

Keys, ranges, compares, transactions, pages, reads of the past, leases, compactions, a watch, and
what is refused. The store in memory shares no code with etcd's drivers, so that a mistake of theirs
shows, too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Iterator
from contextlib import aclosing
from itertools import pairwise

import pytest

from rdzv.errors import Compacted, LeaseLost, StoreError, StoreRefused
from rdzv.store import (
    Compare,
    Delete,
    KeyValue,
    Operation,
    Page,
    Put,
    Range,
    RangeResult,
    Store,
    TxnResult,
    WatchBatch,
    WatchEvent,
)
from tests.support.store.backend import real_etcd
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.patient_store import PatientEtcdStore
from tests.support.store.secure import secure_cluster

__all__ = ["secure_cluster"]

pytestmark = pytest.mark.etcd

CALLS = 200
LEASES = 3
NAMES = ["", "a", "a/", "a/1", "a/2", "a/é", "a/\U0001f600", "a.", "a0", "b", "a\0", "a\udcff"]
ODD_NAMES = ["%", "50%25", "a//b", "späße", "日本", "sp ace", "q?#&=", "\x01", "\x7f", "\udcff"]
SIZES = [0, 1, 2, 2, 2, 4096, 65536]
LAST = b"the last"
"""The value that ends a watch; no random one has its length."""


class Script:
    """Random calls under one prefix; the same seed gives the same ones."""

    def __init__(self, seed: int, prefix: str, base: int) -> None:
        self.revision = base
        self._random = random.Random(seed)
        self._prefix = prefix
        self._base = base
        self._compacted = base
        self._first_lease = (seed + 1) << 48

    def leases(self) -> range:
        return range(self._first_lease, self._first_lease + LEASES)

    def compaction(self) -> int:
        """The revision to compact at now, mostly 0 for none; it may be past or to come."""
        if self._random.random() < 0.98:
            return 0
        at = max(self._base, self.revision - self._random.randrange(-1, 20))
        self._compacted = max(self._compacted, at)
        return at

    def call(self, store: Store) -> Awaitable[object]:
        match self._random.randrange(20):
            case 0:
                return store.range(self._key(), prefix=self._random.random() < 0.5)
            case 1 | 2:
                return store.page(
                    self._prefix,
                    limit=self._random.randrange(1, 6),
                    after=self._random.choice(["", self._key()]),
                    revision=self._past(),
                )
            case 3:
                return store.lease_keep_alive(self._lease())
            case 4 if self._random.random() < 0.3:
                return store.lease_revoke(self._lease())
            case 5 if self._random.random() < 0.5:
                return store.lease_grant(self._lease(), 600)
            case 7:
                at = self._past()
                past = Range(self._key(), prefix=self._random.random() < 0.5, revision=at)
                # Where the read is refused, members of etcd 3.6.16 do not treat a write beside it
                # alike: the one that is asked does nothing, the others count a revision.
                readable = not at or self._compacted < at <= self.revision
                write = [Put(self._key(), b"")] if readable else []
                return store.txn([], [past, *write])
            case 8:
                return store.txn(*self._malformed())
        compares = [self._compare() for _ in range(self._random.randrange(3))]
        return store.txn(compares, self._operations(), self._operations())

    def _key(self) -> str:
        names = NAMES if self._random.random() < 0.9 else ODD_NAMES
        return self._prefix + self._random.choice(names)

    def _lease(self) -> int:
        # The last one is never granted first.
        return self._first_lease + self._random.randrange(LEASES + 1)

    def _past(self) -> int:
        """Now, mostly; else a revision that is past, perhaps compacted, or to come."""
        if self._random.random() < 0.6:
            return 0
        back = self._random.choice([-1000, 0, 1, 2, 5, 10, 50])
        return max(self._base, self.revision - back)

    def _value(self) -> bytes:
        return self._random.randbytes(self._random.choice(SIZES))

    def _operation(self) -> Operation:
        match self._random.randrange(4):
            case 0 | 1:
                lease = 0 if self._random.random() < 0.6 else self._lease()
                return Put(self._key(), self._value(), lease)
            case 2:
                return Delete(self._key(), prefix=self._random.random() < 0.2)
        return Range(self._key(), prefix=self._random.random() < 0.5)

    def _operations(self) -> list[Operation]:
        return [self._operation() for _ in range(self._random.randrange(4))]

    def _compare(self) -> Compare:
        target = self._random.choice(["create", "mod", "version", "lease", "value"])
        past = self._base + self._random.randrange(1 + self.revision - self._base)
        operands: dict[str, int | bytes] = {
            "create": self._random.choice([0, past, past]),
            "mod": self._random.choice([0, past, past]),
            "version": self._random.randrange(4),
            "lease": self._random.choice([0, self._lease()]),
            "value": self._random.choice([b"", self._random.randbytes(1)]),
        }
        return Compare(
            self._key(),
            target,  # type: ignore[arg-type]
            self._random.choice(["=", "!=", "<", ">"]),
            operands[target],
            prefix=self._random.random() < 0.4,
        )

    def _malformed(self) -> tuple[list[Compare], list[Operation], list[Operation]]:
        key = self._key() + "m"
        put = Put(key, b"1")
        branch: list[Operation] = self._random.choice(
            [
                [put, put],
                [put, Delete(self._prefix, prefix=True)],
                [Put("", b"1")],
                [Put(f"{key}{number}", b"") for number in range(129)],
            ]
        )
        # Refused also as the branch that would not run.
        return self._random.choice([([], branch, []), ([], [], branch)])


def rebased(kv: KeyValue, base: int) -> KeyValue:
    create = kv.create_revision and kv.create_revision - base
    return kv._replace(create_revision=create, mod_revision=kv.mod_revision - base)


def plain(answer: object, base: int) -> object:
    """An answer with revisions that count from the beginning of the script."""
    match answer:
        case TxnResult():
            responses = [
                tuple(rebased(kv, base) for kv in one) if isinstance(one, tuple) else one
                for one in answer.responses
            ]
            return answer.succeeded, answer.revision - base, responses
        case Page():
            kvs = [rebased(kv, base) for kv in answer.kvs]
            return answer.revision - base, kvs, answer.more
        case RangeResult():
            return answer.revision - base, [rebased(kv, base) for kv in answer.kvs]
    return answer


async def play(store: Store, seed: int, prefix: str) -> tuple[list[object], list[WatchEvent]]:
    """What the store answers to each call of a script, and what a watch beside it delivers."""
    base = (await store.range(prefix)).revision
    script = Script(seed, prefix, base)
    answers: list[object] = []
    for lease in script.leases():
        await store.lease_grant(lease, 600)
    batches: list[WatchBatch] = []
    moved = asyncio.Event()

    async def follow() -> None:
        async with aclosing(store.watch(prefix, base + 1)) as watch:
            async for batch in watch:
                batches.append(batch)
                moved.set()
                if batch.events and batch.events[-1].kv.value == LAST:
                    return

    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        tasks.create_task(follow())
        # Its event tells that the watch has begun.
        script.revision = (await store.txn([], [Put(prefix, b"")])).revision
        await moved.wait()
        for _ in range(CALLS):
            try:
                if at := script.compaction():
                    while batches[-1].revision < script.revision:
                        # One that lags behind may be told that its history is gone.
                        moved.clear()
                        await moved.wait()
                    await store.compact(at)
                answer = await script.call(store)
                answers.append(plain(answer, base))
                if isinstance(answer, TxnResult | RangeResult):
                    script.revision = answer.revision
            except StoreError as error:
                answers.append(type(error))
        for lease in (*script.leases(), script.leases().stop):
            await store.lease_revoke(lease)
        answers.append(plain(await store.range(prefix, prefix=True), base))
        script.revision = (await store.txn([], [Put(prefix, LAST)])).revision
    await store.compact(script.revision)
    for late in (
        store.page(prefix, limit=1, revision=base + 1),
        store.txn([], [Range(prefix, revision=base + 1)]),
        anext(store.watch(prefix, base + 1)),
    ):
        with pytest.raises(Compacted):
            await late
    # The next driver begins with nothing.
    await store.txn([], [Delete(prefix, prefix=True)])
    reached = base
    for batch in batches:
        # A batch has whole revisions, and nothing comes after it that belongs before its end.
        revisions = [event.kv.mod_revision for event in batch.events]
        assert all(reached < revision <= batch.revision for revision in revisions)
        assert all(one <= other for one, other in pairwise(revisions))
        reached = max(reached, batch.revision)
    events = [event for batch in batches for event in batch.events]
    return answers, [WatchEvent(one.kind, rebased(one.kv, base)) for one in events]


@pytest.fixture(scope="module")
def etcd_cluster() -> Iterator[EtcdCluster]:
    """A member for the driver under test, in the place of those that other tests have leases in."""
    with EtcdCluster(1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def secure_etcd_cluster(secure_cluster: EtcdCluster) -> EtcdCluster:
    """The same with users."""
    return secure_cluster


@pytest.fixture(scope="module")
def member() -> Iterator[EtcdCluster]:
    """One of the tests' own, where no lease of another test ends in between."""
    with EtcdCluster(1) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=range(5))
def expected(
    request: pytest.FixtureRequest, member: EtcdCluster
) -> tuple[int, tuple[list[object], list[WatchEvent]]]:
    """A seed, and what the default driver makes of it on real etcd."""

    async def ask() -> tuple[list[object], list[WatchEvent]]:
        store = PatientEtcdStore(member.endpoints)
        try:
            return await play(store, request.param, f"/differential/{request.param}/")
        finally:
            await store.close()

    return request.param, asyncio.run(ask())


OTHERS = [
    "memory",
    "embedded",
    *(one for one in real_etcd if str(one.values[0]).partition(" ")[0] != "etcd"),
]


@pytest.mark.parametrize("backing", OTHERS, indirect=True)
async def test_same_calls_same_answers(
    expected: tuple[int, tuple[list[object], list[WatchEvent]]], store: Store
) -> None:
    seed, (answers, events) = expected
    told, seen = await play(store, seed, f"/differential/{seed}/")
    for number, (one, other) in enumerate(zip(told, answers, strict=True)):
        assert one == other, number
    assert seen == events
    assert {LeaseLost, StoreRefused} <= {one for one in answers if type(one) is type}
    assert len(events) > CALLS / 3
