# SPDX-License-Identifier: Apache-2.0
"""A client whose registrations are counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rdzv.job import JobClient
from rdzv.store.memory.client import Faults, MemoryEngine, MemoryStore
from tests.support.clocks.virtual import now
from tests.support.sidecars.jobs import KEYS, loaded


class Watched(Faults):
    """Counts calls; the watch delivers nothing while ``behind``."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.called = asyncio.Event()
        self._level = asyncio.Event()
        self._level.set()

    def fall_behind(self) -> None:
        self._level.clear()

    def catch_up(self) -> None:
        self._level.set()

    async def before(self, call: str) -> None:
        self.calls[call] += 1
        self.called.set()

    async def delivering(self) -> None:
        await self._level.wait()

    async def until(self, call: str, count: int) -> None:
        async with asyncio.timeout(40):
            while self.calls[call] < count:
                self.called.clear()
                await self.called.wait()


@asynccontextmanager
async def watched_client(engine: MemoryEngine, faults: Watched) -> AsyncIterator[JobClient]:
    store = MemoryStore(engine, faults=faults)
    try:
        async with loaded(JobClient.of(store, KEYS, clock=now)) as one:
            yield one
    finally:
        await store.close()
