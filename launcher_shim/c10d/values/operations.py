# SPDX-License-Identifier: Apache-2.0
"""Every operation of a c10d client on a key that is not the rendezvous state.

A cached hit answers at once, also while the store is away; a miss needs a linearizable read.
Writes wait for the store: torch's client has no time-out for them and takes a closed connection
for the end of the job. Each is linearizable, and applied once whatever becomes of its answer
(``launcher_shim.c10d.values.ledger``).

A hit may be older than what another sidecar's client has written meanwhile, but it is never older
than anything that a client of this sidecar was told before: all of them see one history, which
does not go back (docs/decisions/0018-consistency.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from launcher_shim.c10d.values.answers import Answers
from launcher_shim.c10d.values.cell import ABSENT, read_number, wrap_int64
from launcher_shim.c10d.values.cells import Cells
from launcher_shim.c10d.values.ledger import Stamp, left_behind
from launcher_shim.c10d.values.limits import batches, check_size
from launcher_shim.c10d.values.lookups import Lookups
from launcher_shim.c10d.values.read_floor import Floor
from launcher_shim.c10d.values.transactions import CellPlan, Recalled, Transactions, kvs_of
from launcher_shim.c10d.values.waiters import Waiters
from launcher_shim.tcpstore import wire
from rdzv.errors import Compacted
from rdzv.keys import RunKeys
from rdzv.members.guard import Registered
from rdzv.mirror import Mirror
from rdzv.store import (
    Compare,
    Delete,
    KeyValue,
    Operation,
    Put,
    Store,
    TxnResult,
    WatchEvent,
)

T = TypeVar("T")

SEE_SUM_S = 1.0
"""Longest wait for the watch to show what an addition came to; then it is read in the store."""


class Kv:
    """The launchers' keys of one run."""

    def __init__(self, keys: RunKeys, mirror: Mirror, store: Store, registered: Registered) -> None:
        self.keys = keys
        self._mirror = mirror
        self._store = store
        self._waiters = Waiters()
        self._seen_revision = mirror.revision
        self._relists = mirror.relists
        self.answers = Answers()
        self._floor = Floor(mirror, self.answers.forget)
        self.cells = Cells(keys, self._waiters.present, self._waiters.pushed, self.answers.forget)
        self.cells.learn(mirror.under(keys.prefix))
        self._transactions = Transactions(store, registered, self.cells, self._floor)
        self._lookups = Lookups(mirror, self._transactions)
        self._unsubscribe = mirror.subscribe(self._apply)

    def close(self) -> None:
        """The life of the job that these keys are of is over.

        Writes and waits raise ``LeaseLost``, those under way, too.
        """
        self._transactions.end()
        self._waiters.end()
        self.answers.end()
        self._unsubscribe()

    def _apply(self, events: Sequence[WatchEvent]) -> None:
        revision = self._mirror.revision
        if revision < self._seen_revision:
            # The store was restored or emptied.
            self._floor.begin_anew()
            self.cells.begin_anew()
            self.cells.learn(self._mirror.under(self.keys.prefix))
        self._seen_revision = revision
        in_order = self._relists == self._mirror.relists
        self._relists = self._mirror.relists
        self.cells.apply(events, revision, in_order=in_order)

    # -- reading

    def known(self, key: bytes) -> bytes | None:
        """The value as far as it may be told without asking the store."""
        known = self.cells.values.get(key)
        return known[0] if known is not None and self._floor.may_tell(known[1]) else None

    def known_to_exist(self, key: bytes) -> bool:
        """Whether ``key`` exists, as far as that may be told without asking the store."""
        if self.known(key) is not None:
            return True
        return self.cells.exists(key) and self._floor.may_tell(
            self.cells.cell(key).queue_revision()
        )

    def keep_answer(self, data: bytes, requests: Sequence[wire.Request]) -> None:
        """Answer ``requests``, if they are reads, by their bytes alone while nothing changes."""
        if self._floor.reached:
            self.answers.keep(data, requests, self.cells.values)

    async def get(self, key: bytes) -> bytes | None:
        """Read linearizably; None where the key has no value."""
        return (await self._transactions.read([key]))[key].value()

    async def get_all(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Tell the values of ``keys``; those not known are read linearizably."""
        # What may be told now may be told no longer once another client was told something newer.
        told: dict[bytes, bytes] = {}

        def tell(key: bytes) -> bool:
            value = self.known(key)
            if value is not None:
                told[key] = value
            return value is not None

        missing = {key for key in keys if not tell(key)}
        read = await self._lookups.unless_told(missing, tell)
        return [read[key].value() if key in read else told.get(key) for key in keys]

    async def check(self, keys: Sequence[bytes]) -> bool:
        """Whether every key exists; those not known to are read linearizably."""
        missing = {key for key in keys if not self.known_to_exist(key)}
        read = await self._lookups.unless_told(missing, self.known_to_exist)
        return all(cell.exists() for cell in read.values())

    async def wait(self, keys: Sequence[bytes]) -> None:
        """Wait until every key has existed since the request came; raises ``LeaseLost``."""
        missing = {key for key in keys if not self.known_to_exist(key)}
        if not missing:
            return
        with self._waiters.waiting(missing) as waiter:
            for key, cell in (await self._lookups.until(waiter.done, missing)).items():
                if cell.exists():
                    self._waiters.shown(waiter, key)
            await waiter.done
        for key in keys:
            cell = self.cells.cell(key)
            self._floor.tell(max(cell.newest_revision(), cell.newest_of_queue()))

    async def count_reached(self, key: bytes, count: int) -> None:
        """Wait until the counter at ``key`` has reached ``count``.

        Raises ``LeaseLost``, and ``NotANumber``.
        """

        def reached() -> bool:
            return read_number(self.cells.value(key) or b"0") >= count

        if not reached():
            # Judged as each arrival is shown: all may be deleted before this task has its turn.
            with self._waiters.waiting({key}, suits=reached) as waiter:
                await waiter.done
        self._floor.tell(self.cells.value_revision(key))

    async def queue_length(self, key: bytes) -> int:
        """Count a queue's elements, linearizably."""
        return len((await self._transactions.read([key]))[key].queue())

    # -- writing

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
                Put(self.keys.value(key), value),
                Delete(self.keys.addends(key), prefix=True),
            ]

        def learn(result: TxnResult) -> None:
            for key, value in items:
                self.cells.learn_value(key, value, result.revision)

        plan = CellPlan((), tuple(operations), learn, b"%d" % batch)

        async def recall(note: bytes, revision: int) -> Recalled[None] | None:
            return Recalled(None) if int(note) == batch else None

        # What a sidecar before this one has recorded was looked at above.
        await self._transactions.once(stamp._replace(again=False), None, lambda: plan, recall)

    async def compare_set(self, key: bytes, expected: bytes, desired: bytes, stamp: Stamp) -> bytes:
        """COMPARE_SET with the native server's answers, the odd one for a missing key too."""
        check_size(key, desired)

        def modify(value: bytes | None) -> tuple[bytes | None, bytes]:
            if value is None:
                return (desired, desired) if not expected else (None, expected)
            return (desired, desired) if value == expected else (None, value)

        return await self._modify(key, modify, stamp, desired)

    async def append(self, key: bytes, value: bytes, stamp: Stamp) -> None:
        """Append to a value, or create it."""

        def modify(old: bytes | None) -> tuple[bytes | None, None]:
            new = (old or b"") + value
            check_size(key, new)
            return new, None

        await self._modify(key, modify, stamp, None)

    async def add(self, key: bytes, delta: int, stamp: Stamp) -> int:
        """Add to a counter and return the sum; raises ``NotANumber``."""
        own_key = self.keys.addend(key, stamp.author)

        def plan() -> CellPlan[tuple[int, int | None]]:
            cell = self.cells.cell(key)
            own = cell.addends.get(stamp.author, ABSENT)
            before = read_number(own.value) if own.value is not None else 0
            if cell.base.value is not None:
                read_number(cell.base.value)
            return CellPlan(
                (
                    Compare(self.keys.value(key), "mod", "=", cell.base.compared),
                    Compare(own_key, "mod", "=", own.compared),
                ),
                (Put(own_key, b"%d" % wrap_int64(before + delta)),),
                lambda result: (result.revision, None),
            )

        async def recall(note: bytes, revision: int) -> Recalled[tuple[int, int | None]]:
            # At once: the history may be compacted.
            known = awaited.known(revision)
            return Recalled(
                (revision, await self._sum_at(key, revision) if known is None else known)
            )

        with self.cells.sums.awaited(own_key) as awaited:
            revision, total = await self._transactions.once(stamp, key, plan, recall)
            if total is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(SEE_SUM_S):
                        total = await awaited.at(revision)
        if total is None:
            return await self._transactions.settled(lambda: self._sum_at(key, revision))
        return total

    async def _sum_at(self, key: bytes, revision: int) -> int:
        """What a counter was at ``revision``; if that is compacted, what it is now."""
        parts = self.cells.reads(key)[:2]
        try:
            then = [replace(part, revision=revision) for part in parts]
            result = await self._store.txn([], then)
        except Compacted:
            result = await self._store.txn([], parts)
            revision = result.revision
        self._floor.tell(revision)
        return wrap_int64(sum(read_number(kv.value) for kv in kvs_of(result.responses)))

    async def delete(self, key: bytes, stamp: Stamp) -> bool:
        """Delete a key with all that was added to it; whether there was one."""

        def plan() -> CellPlan[bool]:
            cell = self.cells.cell(key)
            if not cell.exists():
                none = (*self.cells.unchanged(key), self._queue_empty(key))
                return CellPlan(none, (), lambda result: False)
            deletes = (
                Delete(self.keys.value(key)),
                Delete(self.keys.addends(key), prefix=True),
                Delete(self.keys.queue(key), prefix=True),
            )

            def gone(result: TxnResult) -> bool:
                self.cells.learn_gone(key, result.revision)
                return True

            there = self.cells.unchanged(key)
            if cell.value() is None:
                name, oldest = cell.queue()[0]
                element = self.keys.element(key, name)
                there = (*there, Compare(element, "mod", "=", oldest.mod_revision))
            return CellPlan(there, deletes, gone)

        async def recall(note: bytes, revision: int) -> Recalled[bool]:
            return Recalled(True)

        return await self._transactions.once(stamp, key, plan, recall)

    async def push(self, key: bytes, value: bytes, stamp: Stamp) -> None:
        """Append an element to a queue."""
        check_size(key, value)
        element = self.keys.element(key, f"{stamp.author}.{stamp.number}")

        def learn(result: TxnResult) -> None:
            kv = KeyValue(element, value, result.revision, result.revision, 1, 0)
            self.cells.learn([kv])

        async def recall(note: bytes, revision: int) -> Recalled[None]:
            return Recalled(None)

        plan = CellPlan((), (Put(element, value),), learn)
        await self._transactions.once(stamp, None, lambda: plan, recall)

    async def pop(self, key: bytes, stamp: Stamp) -> tuple[int, bytes]:
        """Take the oldest element: the length before, and the element if there was one."""

        def plan() -> CellPlan[tuple[int, bytes]]:
            elements = self.cells.cell(key).queue()
            if not elements:
                return CellPlan((self._queue_empty(key),), (), lambda result: (0, b""))
            name, oldest = elements[0]
            value, length = oldest.value or b"", len(elements)
            element = self.keys.element(key, name)

            def taken(result: TxnResult) -> tuple[int, bytes]:
                self.cells.learn_absent(element, result.revision)
                return length, value

            return CellPlan(
                (Compare(element, "mod", "=", oldest.mod_revision),),
                (Delete(element),),
                taken,
                b"%d %s" % (length, value),
            )

        async def recall(note: bytes, revision: int) -> Recalled[tuple[int, bytes]]:
            length, _, value = note.partition(b" ")
            return Recalled((int(length), value))

        await self._transactions.read([key])
        return await self._transactions.once(stamp, key, plan, recall)

    def _queue_empty(self, key: bytes) -> Compare:
        """Hold while nothing has been pushed that is not known here: pushes compare nothing."""
        return Compare(self.keys.queue(key), "create", "=", 0, prefix=True)

    async def forget(self, key_prefix: bytes) -> None:
        """Drop everything under ``key_prefix``: an old round's keys, which torch never deletes."""
        await self._transactions.drop(
            [
                Delete(self.keys.value(key_prefix), prefix=True),
                Delete(self.keys.addends(key_prefix).removesuffix("/"), prefix=True),
                Delete(self.keys.queue(key_prefix).removesuffix("/"), prefix=True),
            ]
        )

    async def forget_author(self, author: str) -> None:
        """Drop the records of a closed connection's operations."""
        await self._transactions.forget(author)

    def left_behind(self, member: str) -> list[str]:
        """Records of connections that ended with a former sidecar of ``member``.

        To be asked before a client of this one is served.
        """
        return left_behind(member, [kv.key for kv in self._mirror.under(self.keys.operations)])

    async def forget_records(self, left: Sequence[str]) -> None:
        """Drop keys of the store that nobody needs any more, as what ``left_behind`` found."""
        await self._transactions.drop([Delete(key) for key in left])

    async def _modify(
        self,
        key: bytes,
        modify: Callable[[bytes | None], tuple[bytes | None, T]],
        stamp: Stamp,
        done: T,
    ) -> T:
        """Change a value: ``modify`` gives the new value (None: leave it) and the answer.

        ``done`` is the answer if it has been changed.
        """

        def plan() -> CellPlan[T]:
            cell = self.cells.cell(key)
            new, answer = modify(cell.value())
            if new is None:
                return CellPlan(self.cells.unchanged(key), (), lambda result: answer)
            value = new
            operations: tuple[Operation, ...] = (Put(self.keys.value(key), value),)
            if cell.is_sum():
                operations += (Delete(self.keys.addends(key), prefix=True),)

            def learn(result: TxnResult) -> T:
                self.cells.learn_value(key, value, result.revision)
                return answer

            return CellPlan(self.cells.unchanged(key), operations, learn)

        async def recall(note: bytes, revision: int) -> Recalled[T]:
            return Recalled(done)

        return await self._transactions.once(stamp, key, plan, recall)
