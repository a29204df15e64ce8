# SPDX-License-Identifier: Apache-2.0
"""Reads of the launchers' keys: from the cache if it may answer, else linearizable.

A cached answer may be older than a write of another sidecar's client, but never older than an
earlier answer to a client of this sidecar (docs/decisions/endpoint.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from launcher_shim.c10d.values.cell import Cell, Floor
from launcher_shim.c10d.values.cells import Cells
from launcher_shim.c10d.values.transactions import READS_MAX, Transactions, grouped
from launcher_shim.tcpstore import wire
from rdzv.errors import LeaseLost, WireError
from rdzv.mirror import Mirror
from rdzv.reconcile import first_of

ANSWERED_READS_MAX = 4
"""Maximum number of requests answered together: torch's client sends a Wait and a Get."""
ANSWERS_MAX = 512
ANSWER_MAX = 4096
"""Maximum bytes of a request and its answer together; the whole cache is at most 2 MiB."""

Values = Mapping[bytes, tuple[bytes, int]]


class Answers:
    """The cache of one run. ``by_request`` is read-only, and stays the same object."""

    def __init__(self) -> None:
        self.by_request: dict[bytes, bytes] = {}
        self._over = False

    def keep(self, data: bytes, requests: Sequence[wire.Request], values: Values) -> None:
        """Keep the answers of ``values`` to ``requests``, whose bytes are ``data``, if complete."""
        if self._over or len(requests) > ANSWERED_READS_MAX or len(data) > ANSWER_MAX:
            return
        answers = [_answer(request, values) for request in requests]
        whole = b"".join(answer for answer in answers if answer is not None)
        if None in answers or len(data) + len(whole) > ANSWER_MAX:
            return
        if len(self.by_request) >= ANSWERS_MAX:
            self.by_request.clear()
        self.by_request[data] = whole

    def forget(self) -> None:
        """Empty the cache: a cell has changed, or the read floor forbids an answer."""
        self.by_request.clear()

    def end(self) -> None:
        """Keep nothing any more: the generation is over."""
        self._over = True
        self.forget()


def _answer(request: wire.Request, values: Values) -> bytes | None:
    """Return the answer of ``values``; None if they do not have it."""
    if isinstance(request, wire.Get):
        entry = values.get(request.key)
        return None if entry is None else wire.vec(entry[0])
    if isinstance(request, wire.Check | wire.Wait) and all(key in values for key in request.keys):
        return wire.READY if isinstance(request, wire.Check) else wire.STOP_WAITING
    return None


def _always() -> bool:
    return True


@dataclass(eq=False, slots=True)
class Waiter:
    """One client's wait for several keys."""

    missing: set[bytes]
    """Keys that have not come yet."""
    done: asyncio.Future[None]
    """Set once every key has come; gets the error that ``suits`` raises."""
    suits: Callable[[], bool] = _always
    """Returns whether the present values are what the client waits for."""

    def suited(self) -> bool:
        """Return whether the value that has just come counts; an error ends the wait."""
        try:
            return self.suits()
        except WireError as error:
            if not self.done.done():
                self.done.set_exception(error)
            return False

    def see(self, key: bytes) -> bool:
        """Note that ``key`` has come; return whether that ends the wait."""
        self.missing.discard(key)
        ends = not self.missing and not self.done.done()
        if ends:
            self.done.set_result(None)
        return ends


class Waiters:
    """The waits of one run, by key."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, list[Waiter]] = {}
        self._over = False

    def __len__(self) -> int:
        return len(self._by_key)

    def end(self) -> None:
        """Wake every waiter with ``LeaseLost``, and refuse new ones: the generation is over."""
        self._over = True
        for waiters in self._by_key.values():
            for waiter in waiters:
                if not waiter.done.done():
                    waiter.done.set_result(None)

    @contextmanager
    def waiting(self, keys: set[bytes], *, suits: Callable[[], bool] = _always) -> Iterator[Waiter]:
        """Wait for all of ``keys`` within the block; leaving it gives up.

        ``suits`` is called as each value comes; if it returns False, the value does not count.
        ``keys`` shrinks to those still missing. Raises ``LeaseLost`` at the end of the block if
        ``end`` was called before all had come.
        """
        waiter = Waiter(keys, asyncio.get_running_loop().create_future(), suits)
        if self._over:
            waiter.done.set_result(None)
        for key in keys:
            self._by_key.setdefault(key, []).append(waiter)
        try:
            yield waiter
        finally:
            for key in waiter.missing:
                self._remove(waiter, key)
        if self._over and waiter.missing:
            raise LeaseLost("the generation of these keys is over")

    def present(self, key: bytes) -> None:
        """Note that ``key`` was created or updated."""
        for waiter in tuple(self._by_key.get(key, ())):
            if waiter.suited():
                self._remove(waiter, key)
                waiter.see(key)

    def pushed(self, key: bytes) -> None:
        """Note that the queue at ``key`` has one more element, which ends one wait.

        It ends the first wait that lacks nothing else. The waits before that have seen the key
        too, as at torch's own server.
        """
        waiters = self._by_key.get(key, [])
        while waiters:
            waiter = waiters[0]
            self._remove(waiter, key)
            if waiter.see(key):
                break

    def shown(self, waiter: Waiter, key: bytes) -> None:
        """Note that a read for ``waiter`` has shown ``key``."""
        if key in waiter.missing:
            self._remove(waiter, key)
            waiter.see(key)

    def _remove(self, waiter: Waiter, key: bytes) -> None:
        self._by_key[key].remove(waiter)
        if not self._by_key[key]:
            del self._by_key[key]


class Reads:
    """The reads of one run.

    They race the watch: no client waits for the store's answer once the watch has brought it.
    """

    def __init__(
        self,
        cells: Cells,
        floor: Floor,
        mirror: Mirror,
        transactions: Transactions,
        waiters: Waiters,
        answers: Answers,
    ) -> None:
        self._cells = cells
        self._floor = floor
        self._mirror = mirror
        self._transactions = transactions
        self._waiters = waiters
        self._answers = answers

    def cached(self, key: bytes) -> bytes | None:
        """Return the cached value; None if there is none, or it must not be answered."""
        entry = self._cells.values.get(key)
        return entry[0] if entry is not None and self._floor.allows(entry[1]) else None

    def cached_exists(self, key: bytes) -> bool:
        """Return whether the cache shows that ``key`` exists, and may answer so."""
        if self.cached(key) is not None:
            return True
        return self._cells.exists(key) and self._floor.allows(
            self._cells.cell(key).queue_revision()
        )

    def keep_answer(self, data: bytes, requests: Sequence[wire.Request]) -> None:
        """Keep the answers to ``requests``, if they are reads, for the same bytes ``data``."""
        if self._floor.reached:
            self._answers.keep(data, requests, self._cells.values)

    async def get_all(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of ``keys``, from the cache or by a linearizable read."""
        # Taken now: a newer answer to another client may forbid the cached value later.
        values: dict[bytes, bytes] = {}

        def take_cached(key: bytes) -> bool:
            value = self.cached(key)
            if value is not None:
                values[key] = value
            return value is not None

        missing = {key for key in keys if not take_cached(key)}
        read = await self._unless_cached(missing, take_cached)
        return [read[key].value() if key in read else values.get(key) for key in keys]

    async def check(self, keys: Sequence[bytes]) -> bool:
        """Return whether every key exists, by the cache or by a linearizable read."""
        missing = {key for key in keys if not self.cached_exists(key)}
        read = await self._unless_cached(missing, self.cached_exists)
        return all(cell.exists() for cell in read.values())

    async def wait(self, keys: Sequence[bytes]) -> None:
        """Wait until every key has existed at some time since now; raises ``LeaseLost``."""
        missing = {key for key in keys if not self.cached_exists(key)}
        if not missing:
            return
        with self._waiters.waiting(missing) as waiter:
            for key, cell in (await self._until(waiter.done, missing)).items():
                if cell.exists():
                    self._waiters.shown(waiter, key)
            await waiter.done
        for key in keys:
            cell = self._cells.cell(key)
            self._floor.raise_to(max(cell.newest_revision(), cell.newest_of_queue()))

    async def _unless_cached(
        self, keys: Collection[bytes], cached: Callable[[bytes], bool]
    ) -> Mapping[bytes, Cell]:
        """Read ``keys``; return nothing if all of them are ``cached`` before the answer comes.

        Only a read can show that a key has no value.
        """

        async def come() -> None:
            while not all(map(cached, keys)):
                await self._mirror.changed_after(self._mirror.sequence)

        if not keys:
            return {}
        coming = asyncio.ensure_future(come())
        try:
            return await self._until(coming, keys)
        finally:
            coming.cancel()

    async def _until(
        self, come: asyncio.Future[None], keys: Collection[bytes]
    ) -> Mapping[bytes, Cell]:
        """Read ``keys``; return nothing if ``come`` is done first.

        Keys that are taken out of ``keys`` meanwhile are not read. Up to ``limits.READS_MAX`` keys
        are read at one revision.
        """

        async def read() -> dict[bytes, Cell]:
            cells: dict[bytes, Cell] = {}
            for batch in grouped(tuple(keys), READS_MAX):
                if left := [key for key in batch if key in keys]:
                    cells |= await self._transactions.read(left)
            return cells

        return await first_of(read(), asyncio.shield(come)) or {}
