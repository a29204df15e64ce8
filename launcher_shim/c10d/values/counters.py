# SPDX-License-Identifier: Apache-2.0
"""Counters of the launchers: each adder has a store key of its own, and their sum counts."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

from launcher_shim.c10d.values.cell import ABSENT, read_number, wrap_int64
from launcher_shim.c10d.values.cells import Cells
from launcher_shim.c10d.values.ledger import Stamp
from launcher_shim.c10d.values.read_floor import Floor
from launcher_shim.c10d.values.transactions import CellPlan, Recalled, Transactions, kvs_of
from launcher_shim.c10d.values.waiters import Waiters
from rdzv.errors import Compacted
from rdzv.store import Compare, Put, Store

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
