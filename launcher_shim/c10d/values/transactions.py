# SPDX-License-Identifier: Apache-2.0
"""The transactions of one run's launchers: each is retried until it is applied exactly once.

torch's client has no timeout for its writes and takes a closed connection for the end of the job,
so a request is retried for as long as its connection lives. If an answer is lost, the ledger
shows whether the operation was applied (``launcher_shim.c10d.values.transactions``).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Generic, NamedTuple, TypeVar

from launcher_shim.c10d.values.cell import Cell, Floor
from launcher_shim.c10d.values.cells import Cells
from rdzv.dataclass import dataclass
from rdzv.errors import LeaseLost, StoreAmbiguous, StoreError, StoreFull, WireError
from rdzv.job import Registered
from rdzv.keys import RunKeys, last_name
from rdzv.sentences import Diary
from rdzv.store import Compare, Delete, KeyValue, Operation, Put, Range, Store, TxnResult

log = logging.getLogger(__name__)


MAX_VALUE_BYTES = 1 << 20
"""etcd takes requests up to 1.5 MiB by default; torch's own limit of 8 MiB does not fit."""

BATCH_MAX = 63
"""Maximum number of items set by one transaction: each takes two operations of the 128 that etcd
allows, and one records them."""

READS_MAX = 42
"""Maximum number of keys read by one transaction: each takes three of the 128 operations."""

DELETES_MAX = 100
"""Maximum number of keys dropped by one transaction."""


def check_size(key: bytes, value: bytes) -> None:
    """Raise ``WireError`` if the value is too long for the store."""
    if len(value) > MAX_VALUE_BYTES:
        raise WireError(
            f"{key[:64]!r} has {len(value)} bytes: the store takes at most {MAX_VALUE_BYTES}"
        )


def batches(items: Sequence[tuple[bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
    """Split items that are too many, or too long, for one transaction."""
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


def grouped(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Split into groups of at most ``size``."""
    return (items[first : first + size] for first in range(0, len(items), size))


class Stamp(NamedTuple):
    """Identity of one request."""

    author: str
    """Name of the client's connection."""
    number: int
    """Number of the request on it."""
    again: bool = False
    """Whether an earlier sidecar may have carried it out already."""
    lasting: bool = False
    """Whether its author may have made requests of an earlier sidecar."""

    def aside(self) -> Stamp:
        """Return the stamp of an operation that runs aside of the same client's later requests."""
        return self._replace(author=f"{self.author}:{self.number}")


class Ledger:
    """The ledger of this sidecar's clients, in one run."""

    def __init__(self, keys: RunKeys) -> None:
        self._keys = keys
        self._revisions: dict[str, int] = {}

    def knows(self, stamp: Stamp) -> bool:
        """Return whether the author's entry is known; if not, read it before a write."""
        return not stamp.lasting or stamp.author in self._revisions

    def guard(self, stamp: Stamp) -> Compare:
        """Return the compare that holds while the author's entry is the known one."""
        revision = self._revisions.get(stamp.author, 0)
        return Compare(self._keys.operation(stamp.author), "mod", "=", revision)

    def entry(self, stamp: Stamp, note: bytes) -> Put:
        """Return the write of an entry; ``note`` is kept for the answer to a retry."""
        return Put(self._keys.operation(stamp.author), b"%d %s" % (stamp.number, note))

    def look(self, stamp: Stamp) -> Range:
        """Return the read of the author's entry; ``take_entry`` takes the answer."""
        return Range(self._keys.operation(stamp.author))

    def recorded(self, stamp: Stamp, revision: int) -> None:
        """Note that ``entry`` was written at ``revision``."""
        self._revisions[stamp.author] = revision

    def take_entry(self, stamp: Stamp, kvs: Iterable[KeyValue]) -> tuple[bytes, int] | None:
        """Note a read entry; return its note and revision if it is of this very operation."""
        self._revisions[stamp.author] = 0
        for kv in kvs:
            self._revisions[stamp.author] = kv.mod_revision
            number, _, note = kv.value.partition(b" ")
            if number == b"%d" % stamp.number:
                return note, kv.mod_revision
        return None

    def forget(self, author: str) -> list[Delete]:
        """Return the deletion of all entries of a connection that is closed for good."""
        for name in [name for name in self._revisions if name.partition(":")[0] == author]:
            del self._revisions[name]
        return [
            Delete(self._keys.operation(author)),
            Delete(self._keys.operation(f"{author}:"), prefix=True),
        ]


def left_behind(member: str, operations: Iterable[str]) -> list[str]:
    """Return entries of connections that ended with a former sidecar of ``member``.

    Connections behind a relay are left out: they go on.
    """
    direct = re.compile(rf"{re.escape(member)}\.[0-9a-f]{{12}}\.\d+(:\d+)?")
    return [key for key in operations if direct.fullmatch(last_name(key))]


T = TypeVar("T")

RETRY_PAUSE_S = 0.2

NOTHING = b"nothing"
"""Ledger entry that cancels an operation: a delayed earlier attempt then fails its compare."""


@dataclass(frozen=True, slots=True)
class CellPlan(Generic[T]):
    """One operation on a cell."""

    compares: tuple[Compare, ...]
    operations: tuple[Operation, ...]
    """The writes if the compares hold."""
    answer: Callable[[TxnResult], T]
    """Builds the answer from the transaction's result."""
    note: bytes = b""
    """Stored in the ledger, for the answer to a retry."""


@dataclass(frozen=True, slots=True)
class Recalled(Generic[T]):
    """The answer of an operation that had been applied already."""

    answer: T


Recall = Callable[[bytes, int], Recalled[T] | None]
"""Returns the answer of an attempt that was applied, from its note and revision."""


class Transactions:
    """One run's transactions: reads into ``cells``, and writes under the registration guard."""

    def __init__(self, store: Store, registered: Registered, cells: Cells, floor: Floor) -> None:
        self._store = store
        self._registered = registered
        self._cells = cells
        self._floor = floor
        self.ledger = Ledger(cells.keys)
        self._over = False

    def end(self) -> None:
        """Stop retrying, because the generation is over: ``once`` fails instead of waiting."""
        self._over = True

    async def once(
        self, stamp: Stamp, key: bytes | None, plan: Callable[[], CellPlan[T]], recall: Recall[T]
    ) -> T:
        """Apply a plan exactly once: retry until its outcome is known.

        ``plan`` depends on the cell of ``key``, which is read again if a compare fails. ``recall``
        builds the answer if an earlier attempt was applied. Raises ``LeaseLost`` once the
        generation is over and nothing was applied.
        """
        unsettled = stamp.again
        looked = self.ledger.knows(stamp) and not stamp.again
        contended = False
        applied: tuple[bytes, int] | None = None

        async def attempt() -> T:
            nonlocal unsettled, looked, contended, applied
            if not looked:
                applied = await self._look(stamp)
                looked = True
            while True:
                if applied is not None and applied[0] != NOTHING:
                    recalled = recall(*applied)
                    if recalled is not None:
                        self._floor.raise_to(applied[1])
                        return recalled.answer
                current = plan()
                signed = bool(current.operations) or unsettled
                try:
                    result = await self._send(
                        current, stamp, key, signed=signed, contended=contended
                    )
                except (StoreAmbiguous, StoreFull):
                    # A read needs no space, and gets a counter's history before it is compacted.
                    unsettled, looked = True, False
                    raise
                if result.succeeded:
                    return self._answered(current, key, result)
                if not contended:
                    # Without contention, the usual case, no reads are sent along.
                    contended = True
                    result = await self._store.txn([], self._looks(stamp, key))
                before = applied
                applied = self.ledger.take_entry(stamp, kvs_of(result.responses[:1]))
                if key is not None:
                    self._cells.learn_cell(key, result.revision, kvs_of(result.responses[2:]))
                if signed and applied == before:
                    # The entry is unchanged, so its guard held: another compare failed.
                    self._registered.check(kvs_of(result.responses[1:2]))

        return await self.settled(attempt)

    async def noted(self, stamp: Stamp) -> bytes | None:
        """Return the note of this operation if it was applied before, in part or in whole."""
        entry = await self.settled(lambda: self._look(stamp))
        return None if entry is None else entry[0]

    async def read(self, keys: Sequence[bytes]) -> dict[bytes, Cell]:
        """Read at most ``limits.READS_MAX`` keys linearizably, all at one moment."""

        async def attempt() -> dict[bytes, Cell]:
            reads = [self._cells.reads(key) for key in keys]
            result = await self._store.txn([], list(chain.from_iterable(reads)))
            cells: dict[bytes, Cell] = {}
            responses = iter(result.responses)
            for key, ranges in zip(keys, reads, strict=True):
                kvs = kvs_of(list(islice(responses, len(ranges))))
                cell = cells[key] = self._cells.learn_cell(key, result.revision, kvs)
                self._floor.raise_to_read(cell, result.revision)
            return cells

        return await self.settled(attempt)

    async def drop(self, deletes: Sequence[Delete]) -> None:
        """Delete keys that are not needed any more.

        Raises ``LeaseLost`` if this sidecar is not registered: then they stay.
        """
        for batch in grouped(deletes, DELETES_MAX):
            result = await self._store.txn([self._registered.holds()], batch)
            if not result.succeeded:
                raise LeaseLost("the member record is gone, or on another lease")

    # -- internals

    async def _send(
        self,
        current: CellPlan[T],
        stamp: Stamp,
        key: bytes | None,
        *,
        signed: bool,
        contended: bool,
    ) -> TxnResult:
        """Try a plan once; ``signed``: with a ledger entry, as every write must have.

        ``contended``: have the store return the present keys if a compare fails.
        """
        compares = [*current.compares, self.ledger.guard(stamp)]
        then = list(current.operations)
        if signed:
            note = current.note if then else NOTHING
            then.insert(0, self.ledger.entry(stamp, note))
            compares.append(self._registered.holds())
        otherwise = self._looks(stamp, key) if contended else ()
        result = await self._store.txn(compares, then, otherwise)
        if result.succeeded and signed:
            self.ledger.recorded(stamp, result.revision)
        return result

    def _looks(self, stamp: Stamp, key: bytes | None) -> list[Range]:
        """Return the reads that show which compare failed: ledger, registration, and key."""
        looks = [self.ledger.look(stamp), self._registered.look()]
        return looks if key is None else looks + self._cells.reads(key)

    def _answered(self, current: CellPlan[T], key: bytes | None, result: TxnResult) -> T:
        answer = current.answer(result)
        if current.operations:
            self._floor.raise_to(result.revision)
        elif key is not None:
            self._floor.raise_to_read(self._cells.cell(key), result.revision)
        return answer

    async def _look(self, stamp: Stamp) -> tuple[bytes, int] | None:
        """Read this operation's ledger entry: its note and revision."""
        result = await self._store.txn([], [self.ledger.look(stamp)])
        return self.ledger.take_entry(stamp, kvs_of(result.responses))

    async def settled(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Retry ``attempt`` until its outcome is known; it must be idempotent.

        Bounded by the client's connection, which cancels it when the client is gone; a request
        without an answer, such as SET, only after
        ``launcher_shim.c10d.endpoint.LAST_WRITES_TIMEOUT_S``.
        """
        diary = Diary(log)
        while True:
            try:
                return await attempt()
            except StoreError as error:
                if self._over and isinstance(error, LeaseLost):
                    raise
                diary.say(f"retrying a launcher's request: {error}", level=logging.WARNING)
                await asyncio.sleep(RETRY_PAUSE_S)


def kvs_of(responses: Sequence[tuple[KeyValue, ...] | int | None]) -> list[KeyValue]:
    """Return the results of the reads among a transaction's operations."""
    return [kv for response in responses if isinstance(response, tuple) for kv in response]
