# SPDX-License-Identifier: Apache-2.0
"""Sidecars that watch each other on a machine that is far too busy: none is ever evicted."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from rdzv.keys import JobKeys
from rdzv.records.job import HistoryEntry
from rdzv.store.memory.client import MemoryStore
from rdzv.store.memory.server import EmbeddedServer
from tests.support.sidecars.processes import CONSOLE, sidecar

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SIDECARS = 5
BUSY_PER_CORE = 10
LASTS_S = 600.0
KEYS = JobKeys("default", "digits")


@asynccontextmanager
async def busy() -> AsyncIterator[None]:
    """Let ten processes a core never rest."""
    count = BUSY_PER_CORE * (os.cpu_count() or 1)
    spinning = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for one in spinning:
            one.kill()
            await one.wait()


async def test_i5_nobody_is_evicted_in_ten_minutes_at_ten_processes_a_core(tmp_path: Path) -> None:
    async with EmbeddedServer() as server, AsyncExitStack() as stack:
        for number in range(SIDECARS):
            name = f"node-{number}"
            one = sidecar(server.endpoint, tmp_path / name, name, CONSOLE)
            await (await stack.enter_async_context(one)).until_ready()
        suspected: list[str] = []
        store = MemoryStore(server.engine)
        async with busy():

            async def look() -> None:
                async for batch in store.watch(KEYS.in_generation(1).suspicions, 1):
                    suspected.extend(e.kv.key for e in batch.events if e.kind == "put")

            looking = asyncio.create_task(look())
            await asyncio.sleep(LASTS_S)
            looking.cancel()
            await asyncio.wait([looking])
        read = await store.range(KEYS.history, prefix=True)
        happened = [HistoryEntry.from_kv(kv).what for kv in read.kvs]
        assert happened.count("lost") == 0
        assert suspected == []
