# SPDX-License-Identifier: Apache-2.0
"""Every operation of a c10d client on a key that is not the rendezvous state.

A cached hit answers at once, also while the store is away; a miss needs a linearizable read.
Writes wait for the store: torch's client has no time-out for them and takes a closed connection
for the end of the job. An operation whose outcome is unknown is repeated with the very same
compare, and carries its number in the same transaction, so it is never applied twice. Of a client
behind a relay it may have been begun by a sidecar before this one: then that number is looked for
first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from launcher_shim.c10d.cells import Cell, Cells, read_number, wrap_int64
from launcher_shim.c10d.waiters import Waiters
from rdzv.errors import StoreError, WireError
from rdzv.keys import RunKeys
from rdzv.store import (
    Compare,
    Delete,
    KeyValue,
    Operation,
    Put,
    Range,
    Store,
    TxnResult,
    WatchEvent,
)
from rdzv.watching import Mirror

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_PAUSE_S = 0.2
MAX_VALUE_BYTES = 1 << 20
"""etcd takes requests up to 1.5 MiB by default; torch's own limit of 8 MiB does not fit."""

BATCH_MAX = 64
"""Items set by one transaction: each takes two operations of the 128 that etcd allows."""


class Stamp(NamedTuple):
    """Whose request it is, and which one: ``author`` is the client's connection.

    ``again``: it may have been carried out before. ``lasting``: the author may outlive this
    sidecar, so that what it has done stays on record when the lease is gone.
    """

    author: str
    number: int
    again: bool = False
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class Plan(Generic[T]):
    """What one operation does to a cell, and what it answers if nobody came in between."""

    operations: tuple[Operation, ...]
    answer: T
    learn: Callable[[int], None] = lambda revision: None


class Kv:
    """The launchers' keys of one run."""

    def __init__(
        self, keys: RunKeys, mirror: Mirror, store: Store, lease_id: Callable[[], int | None]
    ) -> None:
        self.keys = keys
        self._mirror = mirror
        self._store = store
        self._lease_id = lease_id
        self._waiters = Waiters()
        self._seen_revision = mirror.revision
        self.cells = Cells(keys, self._waiters.present)
        self.cells.learn(mirror.under(keys.prefix))
        self.close = mirror.subscribe(self._apply)

    def _apply(self, events: Sequence[WatchEvent]) -> None:
        revision = self._mirror.revision
        if revision < self._seen_revision:
            # The store was restored or emptied: revisions start anew, and so does what is known.
            self.cells = Cells(self.keys, self._waiters.present)
            self.cells.learn(self._mirror.under(self.keys.prefix))
        self._seen_revision = revision
        self.cells.apply(events, revision)

    # -- reading

    async def get(self, key: bytes) -> bytes | None:
        """Read linearizably; None where the key has no value."""
        return (await self._read(key)).value()

    async def check(self, keys: Sequence[bytes]) -> bool:
        """Whether every key exists; those not known to are read linearizably."""
        for key in keys:
            if not self.cells.exists(key) and not (await self._read(key)).exists():
                return False
        return True

    async def wait(self, keys: Sequence[bytes]) -> None:
        """Wait until every key has existed since the request came."""
        missing = {key for key in keys if not self.cells.exists(key)}
        if not missing:
            return
        with self._waiters.waiting(missing) as done:
            for key in tuple(missing):
                if (await self._read(key)).exists():
                    self._waiters.present(key)
            await done

    async def count_reached(self, key: bytes, count: int) -> None:
        """Wait until the counter at ``key`` has reached ``count``."""
        while read_number(self.cells.value(key) or b"0") < count:
            with self._waiters.waiting({key}) as updated:
                await updated

    async def queue_length(self, key: bytes) -> int:
        """Count a queue's elements, linearizably."""
        return len((await self._read(key)).queue())

    # -- writing

    async def put(self, items: Sequence[tuple[bytes, bytes]]) -> None:
        """Set all ``items``, in as few transactions as etcd's limits allow.

        A SET whose outcome is unknown is repeated without a compare: torch's clients set a key
        once, so nobody's newer value can be lost by it.
        """
        items = tuple(dict(items).items())
        for key, value in items:
            _check_size(key, value)
        for batch in _batches(items):
            await self._put(batch)

    async def _put(self, items: Sequence[tuple[bytes, bytes]]) -> None:
        operations: list[Operation] = []
        for key, value in items:
            operations += [
                Put(self.keys.value(key), value),
                Delete(self.keys.addends(key), prefix=True),
            ]

        async def attempt() -> None:
            result = await self._store.txn([], operations)
            for key, value in items:
                self._learn_base(key, value, result.revision)

        await self._until_settled(attempt)

    async def compare_set(self, key: bytes, expected: bytes, desired: bytes, stamp: Stamp) -> bytes:
        """COMPARE_SET with the native server's answers, the odd one for a missing key too."""
        _check_size(key, desired)

        def modify(value: bytes | None) -> tuple[bytes | None, bytes]:
            if value is None:
                return (desired, desired) if not expected else (None, expected)
            return (desired, desired) if value == expected else (None, value)

        return await self._modify(key, modify, stamp, desired)

    async def append(self, key: bytes, value: bytes, stamp: Stamp) -> None:
        """Append to a value, or create it."""

        def modify(old: bytes | None) -> tuple[bytes | None, None]:
            new = (old or b"") + value
            _check_size(key, new)
            return new, None

        await self._modify(key, modify, stamp, None)

    async def add(self, key: bytes, delta: int, stamp: Stamp) -> int:
        """Add to a counter and return the sum; raises ``NotANumber``."""
        number = b"%d" % stamp.number
        own_key = self.keys.addend(key, stamp.author)
        # What the watch has not brought yet must not be taken for what was never done.
        cell = await self._read(key) if stamp.again else self.cells.cell(key)

        async def attempt() -> int:
            nonlocal cell
            while True:
                own = cell.addends.get(stamp.author)
                if own is not None and (own.value or b"").endswith(b" #" + number):
                    return read_number(cell.value() or b"0")
                before = read_number(own.value) if own and own.value is not None else 0
                own_revision = own.mod_revision if own and own.value is not None else 0
                value = b"%d #%s" % (wrap_int64(before + delta), number)
                base = read_number(cell.base.value) if cell.base.value is not None else 0
                result = await self._store.txn(
                    [
                        Compare(self.keys.value(key), "mod", "=", _revision(cell.base.value, cell)),
                        Compare(own_key, "mod", "=", own_revision),
                    ],
                    [Put(own_key, value), Range(self.keys.addends(key), prefix=True)],
                )
                if result.succeeded:
                    return wrap_int64(base + self._learn_addends(key, result))
                cell = await self._reread(key)

        return await self._until_settled(attempt)

    async def delete(self, key: bytes, stamp: Stamp) -> bool:
        """Delete a key with all that was added to it; whether there was one."""

        def plan(cell: Cell) -> Plan[bool]:
            if not cell.exists():
                return Plan((), False)
            deletes = (
                Delete(self.keys.value(key)),
                Delete(self.keys.addends(key), prefix=True),
                Delete(self.keys.queue(key), prefix=True),
            )
            return Plan(deletes, True, lambda revision: self._learn_gone(key, revision))

        return await self._change(key, plan, stamp, True)

    async def push(self, key: bytes, value: bytes, stamp: Stamp) -> None:
        """Append an element to a queue."""
        _check_size(key, value)
        element = self.keys.element(key, f"{stamp.author}.{stamp.number}")
        tried = stamp.again

        async def attempt() -> None:
            nonlocal tried
            # Others may have taken the element since: it alone does not tell.
            if tried and await self._recorded(stamp) is not None:
                return
            tried = True
            result = await self._store.txn(
                [Compare(element, "create", "=", 0)],
                [Put(element, value), self._record(stamp)],
            )
            if result.succeeded:
                kv = KeyValue(element, value, result.revision, result.revision, 1, 0)
                self.cells.learn([kv])

        await self._until_settled(attempt)

    async def pop(self, key: bytes, stamp: Stamp) -> tuple[int, bytes]:
        """Take the oldest element: the length before, and the element if there was one."""
        tried = stamp.again

        async def attempt() -> tuple[int, bytes]:
            nonlocal tried
            while True:
                read = await self._store.range(self.keys.queue(key), prefix=True)
                if tried and (recorded := await self._recorded(stamp)) is not None:
                    length, _, element = recorded.partition(b" ")
                    return int(length), element
                elements = sorted(read.kvs, key=lambda kv: kv.create_revision)
                if not elements:
                    return (0, b"")
                oldest, length_before = elements[0], len(elements)
                tried = True
                result = await self._store.txn(
                    [Compare(oldest.key, "mod", "=", oldest.mod_revision)],
                    [
                        Delete(oldest.key),
                        self._record(stamp, b"%d %s" % (length_before, oldest.value)),
                    ],
                )
                if result.succeeded:
                    self.cells.learn_absent(oldest.key, result.revision)
                    return length_before, oldest.value

        return await self._until_settled(attempt)

    async def forget(self, key_prefix: bytes) -> None:
        """Drop everything under ``key_prefix``: an old round's keys, which torch never deletes."""
        await self._store.txn(
            [],
            [
                Delete(self.keys.value(key_prefix), prefix=True),
                Delete(self.keys.addends(key_prefix).removesuffix("/"), prefix=True),
                Delete(self.keys.queue(key_prefix).removesuffix("/"), prefix=True),
            ],
        )

    async def forget_author(self, author: str) -> None:
        """Drop the record of a closed connection's last operation."""
        await self._store.txn([], [Delete(self.keys.operation(author))])

    # -- how

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

        def plan(cell: Cell) -> Plan[T]:
            new, answer = modify(cell.value())
            if new is None:
                return Plan((), answer)
            value = new
            operations: tuple[Operation, ...] = (Put(self.keys.value(key), value),)
            if cell.is_sum():
                operations += (Delete(self.keys.addends(key), prefix=True),)
            return Plan(operations, answer, lambda rev: self._learn_base(key, value, rev))

        return await self._change(key, plan, stamp, done)

    async def _change(
        self, key: bytes, plan: Callable[[Cell], Plan[T]], stamp: Stamp, done: T
    ) -> T:
        """Read, plan, write. A plan stays, with its compare, until it is known to have failed."""
        planned: tuple[list[Compare], Plan[T]] | None = None
        looked = not stamp.again

        async def attempt() -> T:
            nonlocal planned, looked
            if not looked:
                if await self._recorded(stamp) is not None:
                    return done
                looked = True
            while True:
                if planned is None:
                    cell = self.cells.cell(key)
                    planned = (self._unchanged(key, cell), plan(cell))
                compares, current = planned
                then: list[Operation] = [*current.operations]
                if then:
                    then.append(self._record(stamp))
                result = await self._store.txn(compares, then)
                if result.succeeded:
                    current.learn(result.revision)
                    return current.answer
                if await self._recorded(stamp) is not None:
                    return current.answer
                await self._reread(key)
                planned = None

        return await self._until_settled(attempt)

    def _record(self, stamp: Stamp, answer: bytes = b"") -> Put:
        """Note that this operation has been applied, and its answer where only we know it."""
        lease_id = 0 if stamp.lasting else self._lease_id() or 0
        return Put(self.keys.operation(stamp.author), b"%d %s" % (stamp.number, answer), lease_id)

    async def _recorded(self, stamp: Stamp) -> bytes | None:
        """Look whether the operation has been applied: what was noted, or None."""
        for kv in (await self._store.range(self.keys.operation(stamp.author))).kvs:
            number, _, answer = kv.value.partition(b" ")
            if number == b"%d" % stamp.number:
                return answer
        return None

    async def _until_settled(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat ``attempt`` until its outcome is known; it must bear being repeated.

        Bounded by the life of the client's connection: the session cancels it some time after.
        """
        said = ""
        while True:
            try:
                return await attempt()
            except StoreError as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("a launcher's request waits for the store: %s", said)
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _read(self, key: bytes) -> Cell:
        return await self._until_settled(lambda: self._reread(key))

    async def _reread(self, key: bytes) -> Cell:
        result = await self._store.txn([], self._ranges(key))
        return self._learn_cell(key, result, result.responses)

    def _ranges(self, key: bytes) -> list[Operation]:
        return [
            Range(self.keys.value(key)),
            Range(self.keys.addends(key), prefix=True),
            Range(self.keys.queue(key), prefix=True),
        ]

    def _unchanged(self, key: bytes, cell: Cell) -> list[Compare]:
        """Compares that hold while ``key`` is as ``cell`` shows it.

        The range compare is blind to deletions; addends are deleted only together with a write
        of the value itself.
        """
        return [
            Compare(self.keys.value(key), "mod", "=", _revision(cell.base.value, cell)),
            Compare(self.keys.addends(key), "mod", "<", cell.newest_revision() + 1, prefix=True),
        ]

    def _learn_cell(
        self,
        key: bytes,
        result: TxnResult,
        responses: Sequence[tuple[KeyValue, ...] | int | None],
    ) -> Cell:
        """Take in a full read of one cell; the answer is exactly what was read."""
        found = [kv for part in responses if isinstance(part, tuple) for kv in part]
        there = {kv.key for kv in found}
        self.cells.learn(found)
        known = self.cells.cell(key)
        names = [self.keys.value(key)]
        names += [self.keys.addend(key, adder) for adder in known.addends]
        names += [self.keys.element(key, element) for element in known.elements]
        for name in names:
            if name not in there:
                self.cells.learn_absent(name, result.revision)
        return self.cells.cell(key)

    def _learn_addends(self, key: bytes, result: TxnResult) -> int:
        """Take in a counter's addends as the last operation of ``result`` read them; their sum."""
        response = result.responses[-1]
        found = response if isinstance(response, tuple) else ()
        self.cells.learn(found)
        there = {kv.key for kv in found}
        for adder in tuple(self.cells.cell(key).addends):
            if (name := self.keys.addend(key, adder)) not in there:
                self.cells.learn_absent(name, result.revision)
        return sum(read_number(kv.value) for kv in found)

    def _learn_base(self, key: bytes, value: bytes, revision: int) -> None:
        for adder in tuple(self.cells.cell(key).addends):
            self.cells.learn_absent(self.keys.addend(key, adder), revision)
        self.cells.learn([KeyValue(self.keys.value(key), value, revision, revision, 1, 0)])

    def _learn_gone(self, key: bytes, revision: int) -> None:
        cell = self.cells.cell(key)
        names = [self.keys.value(key)]
        names += [self.keys.addend(key, adder) for adder in cell.addends]
        names += [self.keys.element(key, element) for element in cell.elements]
        for name in names:
            self.cells.learn_absent(name, revision)


def _revision(value: bytes | None, cell: Cell) -> int:
    """The mod revision a compare must name: 0 for a value that is absent."""
    return 0 if value is None else cell.base.mod_revision


def _batches(items: Sequence[tuple[bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
    """Split what is too much for one transaction; each item takes two operations of it."""
    batch: list[tuple[bytes, bytes]] = []
    size = 0
    for key, value in items:
        # Each byte of a key may take three, and the key is spelt three times.
        cost = 9 * len(key) + len(value)
        if batch and (len(batch) == BATCH_MAX or size + cost > MAX_VALUE_BYTES):
            yield batch
            batch, size = [], 0
        batch.append((key, value))
        size += cost
    if batch:
        yield batch


def _check_size(key: bytes, value: bytes) -> None:
    if len(value) > MAX_VALUE_BYTES:
        raise WireError(
            f"{key[:64]!r} has {len(value)} bytes: the store takes at most {MAX_VALUE_BYTES}"
        )
