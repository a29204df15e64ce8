# SPDX-License-Identifier: Apache-2.0
"""Reads of the launchers' keys: from the cache if it may answer, else linearizable.

A cached answer may be older than a write of another sidecar's client, but never older than an
earlier answer to a client of this sidecar (docs/decisions/endpoint.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

from launcher_shim.c10d.values.answers import Answers
from launcher_shim.c10d.values.cell import Cell
from launcher_shim.c10d.values.cells import Cells
from launcher_shim.c10d.values.limits import READS_MAX, grouped
from launcher_shim.c10d.values.read_floor import Floor
from launcher_shim.c10d.values.transactions import Transactions
from launcher_shim.c10d.values.waiters import Waiters
from launcher_shim.tcpstore import wire
from rdzv.mirror import Mirror
from rdzv.race import first_of


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
