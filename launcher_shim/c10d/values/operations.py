# SPDX-License-Identifier: Apache-2.0
"""The operations of a c10d client on each key that is not the rendezvous state, and their writes.

A cached hit answers at once, also while the store is away; a miss needs a linearizable read.
Writes wait for the store: torch's client has no timeout for them and takes a closed connection
for the end of the job. Each is linearizable, and applied once whatever becomes of its answer
(``launcher_shim.c10d.values.transactions``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from launcher_shim.c10d.values.cell import ABSENT, Floor, read_number, wrap_int64
from launcher_shim.c10d.values.cells import Cells
from launcher_shim.c10d.values.reads import Answers, Reads, Waiters
from launcher_shim.c10d.values.transactions import (
    CellPlan,
    Recalled,
    Stamp,
    Transactions,
    batches,
    check_size,
    kvs_of,
    left_behind,
)
from rdzv.errors import Compacted
from rdzv.job import Registered
from rdzv.keys import RunKeys
from rdzv.mirror import Mirror
from rdzv.store import Compare, Delete, KeyValue, Operation, Put, Store, TxnResult

SEE_SUM_S = 1.0
"""Maximum wait for the watch to show the sum after an addition, before it is read, in seconds."""


class Counters:
    """The counters of one run."""

    def __init__(
        self,
        store: Store,
        cells: Cells,
        floor: Floor,
        transactions: Transactions,
        waiters: Waiters,
    ) -> None:
        self._store = store
        self._keys = cells.keys
        self._cells = cells
        self._floor = floor
        self._transactions = transactions
        self._waiters = waiters

    async def add(self, key: bytes, delta: int, stamp: Stamp) -> int:
        """Add to a counter and return the sum; raises ``NotANumber``."""
        own_key = self._keys.addend(key, stamp.author)

        def plan() -> CellPlan[int]:
            cell = self._cells.cell(key)
            own = cell.addends.get(stamp.author, ABSENT)
            before = read_number(own.value) if own.value is not None else 0
            if cell.base.value is not None:
                read_number(cell.base.value)
            return CellPlan(
                (
                    Compare(self._keys.value(key), "mod", "=", cell.base.compared),
                    Compare(own_key, "mod", "=", own.compared),
                ),
                (Put(own_key, b"%d" % wrap_int64(before + delta)),),
                lambda result: result.revision,
            )

        total: int | None = None
        with self._cells.awaited_sum(key, stamp.author) as awaited:
            revision = await self._transactions.once(
                stamp, key, plan, lambda note, revision: Recalled(revision)
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(SEE_SUM_S):
                    total = await awaited.shown_at(revision)
        if total is None:
            return await self._transactions.settled(lambda: self._sum_at(key, revision))
        return total

    async def _sum_at(self, key: bytes, revision: int) -> int:
        """Read a counter as of ``revision``; as of now if that is compacted."""
        parts = self._cells.reads(key)[:2]
        try:
            then = [replace(part, revision=revision) for part in parts]
            result = await self._store.txn([], then)
        except Compacted:
            result = await self._store.txn([], parts)
            revision = result.revision
        self._floor.raise_to(revision)
        return wrap_int64(sum(read_number(kv.value) for kv in kvs_of(result.responses)))

    async def count_reached(self, key: bytes, count: int) -> None:
        """Wait until the counter at ``key`` has reached ``count``.

        Raises ``LeaseLost``, and ``NotANumber``.
        """

        def reached() -> bool:
            return read_number(self._cells.value(key) or b"0") >= count

        if not reached():
            # Checked at each arrival: all may be deleted before this task has its turn.
            with self._waiters.waiting({key}, suits=reached) as waiter:
                await waiter.done
        self._floor.raise_to(self._cells.value_revision(key))


class Queues:
    """The queues of one run."""

    def __init__(self, cells: Cells, transactions: Transactions) -> None:
        self._keys = cells.keys
        self._cells = cells
        self._transactions = transactions

    async def push(self, key: bytes, value: bytes, stamp: Stamp) -> None:
        """Append an element to a queue."""
        check_size(key, value)
        element = self._keys.element(key, f"{stamp.author}.{stamp.number}")

        def learn(result: TxnResult) -> None:
            kv = KeyValue(element, value, result.revision, result.revision, 1, 0)
            self._cells.learn([kv])

        plan = CellPlan((), (Put(element, value),), learn)
        await self._transactions.once(stamp, None, lambda: plan, lambda note, _: Recalled(None))

    async def pop(self, key: bytes, stamp: Stamp) -> tuple[int, bytes]:
        """Take the oldest element; return the length before, and the element (empty if none)."""

        def plan() -> CellPlan[tuple[int, bytes]]:
            elements = self._cells.cell(key).queue()
            if not elements:
                return CellPlan((queue_empty(self._keys, key),), (), lambda result: (0, b""))
            name, oldest = elements[0]
            value, length = oldest.value or b"", len(elements)
            element = self._keys.element(key, name)

            def taken(result: TxnResult) -> tuple[int, bytes]:
                self._cells.learn_absent(element, result.revision)
                return length, value

            return CellPlan(
                (Compare(element, "mod", "=", oldest.mod_revision),),
                (Delete(element),),
                taken,
                b"%d %s" % (length, value),
            )

        def recall(note: bytes, revision: int) -> Recalled[tuple[int, bytes]]:
            length, _, value = note.partition(b" ")
            return Recalled((int(length), value))

        await self._transactions.read([key])
        return await self._transactions.once(stamp, key, plan, recall)

    async def length(self, key: bytes) -> int:
        """Count a queue's elements, linearizably."""
        return len((await self._transactions.read([key]))[key].queue())


def queue_empty(keys: RunKeys, key: bytes) -> Compare:
    """Return the compare that holds while a queue is empty: pushes themselves compare nothing."""
    return Compare(keys.queue(key), "create", "=", 0, prefix=True)


T = TypeVar("T")


class Writes:
    """The writes of one run.

    Each is linearizable, and applied once even if its answer is lost
    (``launcher_shim.c10d.values.transactions``).
    """

    def __init__(self, cells: Cells, transactions: Transactions) -> None:
        self._keys = cells.keys
        self._cells = cells
        self._transactions = transactions

    async def put(self, items: Sequence[tuple[bytes, bytes]], stamp: Stamp) -> None:
        """Set all ``items``, in as few transactions as etcd's limits allow."""
        items = tuple(dict(items).items())
        for key, value in items:
            check_size(key, value)
        done = -1
        if stamp.again and (note := await self._transactions.noted(stamp)):
            done = int(note)
        for number, batch in enumerate(batches(items)):
            if number > done:
                await self._put(batch, number, stamp)

    async def _put(self, items: Sequence[tuple[bytes, bytes]], batch: int, stamp: Stamp) -> None:
        operations: list[Operation] = []
        for key, value in items:
            operations += [
                Put(self._keys.value(key), value),
                Delete(self._keys.addends(key), prefix=True),
            ]

        def learn(result: TxnResult) -> None:
            for key, value in items:
                self._cells.learn_value(key, value, result.revision)

        plan = CellPlan((), tuple(operations), learn, b"%d" % batch)
        # The entry of an earlier sidecar was read above.
        await self._transactions.once(
            stamp._replace(again=False),
            None,
            lambda: plan,
            lambda note, _: Recalled(None) if int(note) == batch else None,
        )

    async def compare_set(self, key: bytes, expected: bytes, desired: bytes, stamp: Stamp) -> bytes:
        """Compare and set, with the answers of torch's own server, also for a missing key."""
        check_size(key, desired)

        def modify(value: bytes | None) -> tuple[bytes | None, bytes]:
            if value is None:
                return (desired, desired) if not expected else (None, expected)
            return (desired, desired) if value == expected else (None, value)

        return await self._modify(key, modify, stamp, desired)

    async def append(self, key: bytes, value: bytes, stamp: Stamp) -> None:
        """Append to a value; create it if there is none."""

        def modify(old: bytes | None) -> tuple[bytes | None, None]:
            new = (old or b"") + value
            check_size(key, new)
            return new, None

        await self._modify(key, modify, stamp, None)

    async def delete(self, key: bytes, stamp: Stamp) -> bool:
        """Delete a key with its addends and its queue; return whether it existed."""

        def plan() -> CellPlan[bool]:
            cell = self._cells.cell(key)
            if not cell.exists():
                none = (*self._cells.unchanged(key), queue_empty(self._keys, key))
                return CellPlan(none, (), lambda result: False)
            deletes = (
                Delete(self._keys.value(key)),
                Delete(self._keys.addends(key), prefix=True),
                Delete(self._keys.queue(key), prefix=True),
            )

            def gone(result: TxnResult) -> bool:
                self._cells.learn_gone(key, result.revision)
                return True

            there = self._cells.unchanged(key)
            if cell.value() is None:
                name, oldest = cell.queue()[0]
                element = self._keys.element(key, name)
                there = (*there, Compare(element, "mod", "=", oldest.mod_revision))
            return CellPlan(there, deletes, gone)

        return await self._transactions.once(stamp, key, plan, lambda note, _: Recalled(True))

    async def _modify(
        self,
        key: bytes,
        modify: Callable[[bytes | None], tuple[bytes | None, T]],
        stamp: Stamp,
        done: T,
    ) -> T:
        """Change a value. ``modify`` returns the new value (None: leave it) and the answer.

        ``done`` is the answer if an earlier attempt was applied.
        """

        def plan() -> CellPlan[T]:
            cell = self._cells.cell(key)
            new, answer = modify(cell.value())
            if new is None:
                return CellPlan(self._cells.unchanged(key), (), lambda result: answer)
            value = new
            operations: tuple[Operation, ...] = (Put(self._keys.value(key), value),)
            if cell.is_sum():
                operations += (Delete(self._keys.addends(key), prefix=True),)

            def learn(result: TxnResult) -> T:
                self._cells.learn_value(key, value, result.revision)
                return answer

            return CellPlan(self._cells.unchanged(key), operations, learn)

        return await self._transactions.once(stamp, key, plan, lambda note, _: Recalled(done))


class Kv:
    """The launchers' keys of one run."""

    def __init__(self, keys: RunKeys, mirror: Mirror, store: Store, registered: Registered) -> None:
        self.keys = keys
        self._mirror = mirror
        self._store = store
        self._waiters = Waiters()
        self.answers = Answers()
        self._floor = Floor(mirror, self.answers.forget)
        self.cells = Cells(
            keys,
            mirror,
            self._floor,
            self._waiters.present,
            self._waiters.pushed,
            self.answers.forget,
        )
        self._transactions = Transactions(store, registered, self.cells, self._floor)
        self.reads = Reads(
            self.cells, self._floor, mirror, self._transactions, self._waiters, self.answers
        )
        self.writes = Writes(self.cells, self._transactions)
        self.counters = Counters(store, self.cells, self._floor, self._transactions, self._waiters)
        self.queues = Queues(self.cells, self._transactions)

    def close(self) -> None:
        """End all operations with ``LeaseLost``, also those under way: the generation is over."""
        self._transactions.end()
        self._waiters.end()
        self.answers.end()
        self.cells.close()

    async def forget(self, key_prefix: bytes) -> None:
        """Delete everything under ``key_prefix``: torch never deletes the keys of an old round."""
        await self._transactions.drop(
            [
                Delete(self.keys.value(key_prefix), prefix=True),
                Delete(self.keys.addends(key_prefix).removesuffix("/"), prefix=True),
                Delete(self.keys.queue(key_prefix).removesuffix("/"), prefix=True),
            ]
        )

    async def forget_others(self, root: bytes, present: bytes) -> None:
        """Delete all folders of values under ``root``, which ends with a slash, but ``present``."""
        under = [key for key in self.cells.existing() if key.startswith(root)]
        folders = {key[: key.find(b"/", len(root)) + 1] for key in under} - {b"", present}
        for folder in sorted(folders):
            await self.forget(folder)

    async def forget_author(self, author: str) -> None:
        """Delete the ledger entries of a closed connection."""
        await self._transactions.drop(self._transactions.ledger.forget(author))

    def left_behind(self, member: str) -> list[str]:
        """Return ledger entries of connections that ended with a former sidecar of ``member``.

        Call it before a client of this sidecar is served.
        """
        return left_behind(member, [kv.key for kv in self._mirror.under(self.keys.operations)])

    async def forget_records(self, left: Sequence[str]) -> None:
        """Delete keys of the store that are no longer needed, as ``left_behind`` returns them."""
        await self._transactions.drop([Delete(key) for key in left])
