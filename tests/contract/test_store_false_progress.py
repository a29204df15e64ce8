# SPDX-License-Identifier: Apache-2.0
"""A server that tells a watch that all has been sent while events are on their way.

etcd does so up to 3.4.24 and 3.5.7 (etcd#15220), in an answer to a request for progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from time import monotonic

import pytest

from rdzv.errors import Compacted
from rdzv.store import Put, WatchBatch, WatchEvent
from rdzv.store.access import Access
from rdzv.store.embedded import EmbeddedServer
from rdzv.store.embedded_watch import _Stream
from rdzv.store.memory import MemoryStore
from rdzv.store.pb import etcd_pb2 as pb
from rdzv.watching import Mirror, Watching
from tests.contract.store_backend import DRIVERS


class Hasty:
    """Keeps events of one server back until it has told of progress past them, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keeping_back = False
        responses = _Stream.responses

        def hasty(stream: _Stream) -> Iterator[pb.WatchResponse]:
            if self.keeping_back and stream._watchers:
                if not stream._progress_wanted:
                    return
                self.keeping_back = stream._progress_wanted = False
                yield pb.WatchResponse(header=stream._header(), watch_id=-1)
            yield from responses(stream)

        monkeypatch.setattr(_Stream, "responses", hasty)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Hasty:
    return Hasty(monkeypatch)


@pytest.fixture
async def server(hasty: Hasty) -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer() as server:
        yield server


async def collect(batches: AsyncIterator[WatchBatch], told: list[WatchEvent]) -> None:
    async for batch in batches:
        told += batch.events


@pytest.mark.parametrize("driver", DRIVERS)
async def test_events_that_were_told_to_have_been_sent_are_not_dropped(
    hasty: Hasty, server: EmbeddedServer, driver: str
) -> None:
    direct = MemoryStore(server.engine)
    store = DRIVERS[driver](Access((server.endpoint,)))
    told: list[WatchEvent] = []
    try:
        start = (await direct.txn([], [Put("/team/a", b"")])).revision
        async with asyncio.timeout(60), aclosing(store.watch("/team/", start + 1)) as batches:
            await anext(batches)
            hasty.keeping_back = True
            late = (await direct.txn([], [Put("/team/late", b"")])).revision
            with pytest.raises(Compacted, match="had all been sent") as gone:
                await collect(batches, told)
        assert gone.value.compact_revision == late
        assert told == []
    finally:
        await store.close()


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_mirror_is_read_anew_after_such_a_word(
    hasty: Hasty, server: EmbeddedServer, driver: str
) -> None:
    direct = MemoryStore(server.engine)
    store = DRIVERS[driver](Access((server.endpoint,)))
    await direct.txn([], [Put("/team/a", b"")])
    mirror = Mirror("/team/", monotonic)
    following = asyncio.create_task(Watching(store, mirror).run())
    try:
        async with asyncio.timeout(60):
            await mirror.changed_after(0)
            await mirror.reached((await direct.txn([], [Put("/team/b", b"")])).revision)
            hasty.keeping_back = True
            late = (await direct.txn([], [Put("/team/late", b"1")])).revision
            await mirror.reached(late)
            while "/team/late" not in mirror.kvs:
                await mirror.changed_after(mirror.sequence)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await store.close()
