# SPDX-License-Identifier: Apache-2.0
"""Linearizable reads, raced against the watch: no client waits for the store's answer once the
watch has brought it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from launcher_shim.c10d.values.cell import Cell
from launcher_shim.c10d.values.limits import READS_MAX, grouped
from launcher_shim.c10d.values.transactions import Transactions
from rdzv.mirror import Mirror


class Lookups:
    """The lookups of one run."""

    def __init__(self, mirror: Mirror, transactions: Transactions) -> None:
        self._mirror = mirror
        self._transactions = transactions

    async def unless_cached(
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
            return await self.until(coming, keys)
        finally:
            coming.cancel()

    async def until(
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

        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read(), name="read launchers' keys")
            await asyncio.wait((reading, come), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            reading.cancel()
        return {}
