# SPDX-License-Identifier: Apache-2.0
"""The first read of a job, over a line that cannot carry all of it within one attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from rdzv.errors import StoreUnavailable
from rdzv.job import Watching
from rdzv.mirror import Mirror
from rdzv.pacing import Doubling
from rdzv.store import DEFAULT_TIMEOUT_S, Page, Put
from rdzv.store.access import Access
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from rdzv.store.memory.server import EmbeddedServer
from tests.support.clocks.virtual import now
from tests.support.store.backend import DRIVERS
from tests.support.store.tcp_proxy import TcpProxy
from tests.support.tasks import beside

PREFIX = "/team/"
KEYS = 1200
VALUE = b"v" * 450


async def fill(engine: MemoryEngine) -> None:
    store = MemoryStore(engine)
    for first in range(0, KEYS, 100):
        puts = [Put(f"{PREFIX}{number:05}", VALUE) for number in range(first, first + 100)]
        await store.txn([], puts)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_job_is_read_over_a_line_that_is_too_slow_for_one_answer(driver: str) -> None:
    async with EmbeddedServer() as server:
        await fill(server.engine)
        async with TcpProxy(server.endpoint) as line:
            line.bytes_per_s = 150_000
            store = DRIVERS[driver](Access((line.endpoint,)))
            mirror = Mirror(PREFIX, now)
            try:
                async with beside(Watching(store, mirror).run()), asyncio.timeout(150):
                    await mirror.changed_after(0)
                    assert len(mirror.kvs) == KEYS
            finally:
                await store.close()


class SmallAnswers(MemoryStore):
    """Gives only small pages in time, and none at first; the second waits for ``meanwhile``."""

    def __init__(
        self,
        engine: MemoryEngine,
        most: int,
        meanwhile: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        super().__init__(engine)
        self.asked: list[tuple[int, str]] = []
        self._most = most
        self._meanwhile = meanwhile

    async def page(
        self,
        prefix: str,
        *,
        limit: int,
        after: str = "",
        revision: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Page:
        if after and len(self.asked) == 1 and self._meanwhile is not None:
            await self._meanwhile()
        self.asked.append((limit, after))
        if limit > self._most:
            # As if the whole time had passed.
            await asyncio.sleep(timeout_s / 2)
            raise StoreUnavailable("no answer within its time")
        return await super().page(
            prefix, limit=limit, after=after, revision=revision, timeout_s=timeout_s
        )


@pytest.mark.virtual
async def test_what_has_been_read_is_not_read_again() -> None:
    engine = MemoryEngine(now)
    await fill(engine)
    store, mirror = SmallAnswers(engine, most=300), Mirror(PREFIX, now)
    watching = Watching(store, mirror, random=Random(1), pause=Doubling(0.01, 0.02))
    async with beside(watching.run()), asyncio.timeout(150):
        await mirror.changed_after(0)
    assert len(mirror.kvs) == KEYS
    assert max(limit for limit, _ in store.asked) > 300
    begun = [after for limit, after in store.asked if limit <= 300]
    assert begun == sorted(set(begun))


@pytest.mark.virtual
async def test_a_read_whose_revision_was_compacted_meanwhile_is_begun_anew() -> None:
    engine = MemoryEngine(now)
    await fill(engine)
    other = MemoryStore(engine)

    async def compact() -> None:
        await other.compact((await other.txn([], [Put(PREFIX + "00000", b"")])).revision)

    store, mirror = SmallAnswers(engine, most=KEYS, meanwhile=compact), Mirror(PREFIX, now)
    watching = Watching(store, mirror, pause=Doubling(0.01, 0.02))
    async with beside(watching.run()), asyncio.timeout(150):
        await mirror.changed_after(0)
    assert [after for _, after in store.asked].count("") == 2
    assert mirror.kvs[PREFIX + "00000"].value == b""
    assert len(mirror.kvs) == KEYS
