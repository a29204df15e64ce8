# SPDX-License-Identifier: Apache-2.0
"""Reads of what is not known, raced against the watch: no client waits for an answer of the store
to what the watch has told meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from launcher_shim.c10d.values.cell import Cell
from launcher_shim.c10d.values.limits import READS_MAX, grouped
from launcher_shim.c10d.values.transactions import Transactions
from rdzv.mirror import Mirror


class Lookups:
    """Those of one run."""

    def __init__(self, mirror: Mirror, transactions: Transactions) -> None:
        self._mirror = mirror
        self._transactions = transactions

    async def unless_cached(
        self, keys: Collection[bytes], cached: Callable[[bytes], bool]
    ) -> Mapping[bytes, Cell]:
        """Read ``keys``; nothing, if the watch brings what may be ``cached`` of all of them before.

        That there is no value is only ever told of a read.
        """

        async def come() -> None:
            while not all(map(cached, keys)):
                await self._mirror.changed_after(self._mirror.sequence)

        if not keys:
            return {}
        coming = asyncio.ensure_future(come())
        try:
            return await self.until(coming, keys)
        finally:
            coming.cancel()

    async def until(
        self, come: asyncio.Future[None], keys: Collection[bytes]
    ) -> Mapping[bytes, Cell]:
        """Read ``keys``, as many as are still in there when it is their turn; nothing if ``come``.

        They are one moment where one transaction takes them (``limits.READS_MAX``).
        """

        async def read() -> dict[bytes, Cell]:
            cells: dict[bytes, Cell] = {}
            for batch in grouped(tuple(keys), READS_MAX):
                if left := [key for key in batch if key in keys]:
                    cells |= await self._transactions.read(left)
            return cells

        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read(), name="read launchers' keys")
            await asyncio.wait((reading, come), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            reading.cancel()
        return {}
