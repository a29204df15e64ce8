# SPDX-License-Identifier: Apache-2.0
"""The store of a run: an embedded one or the user's etcd, and our own look into it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from console.local.rounds import Rounds
from console.local.settings import Settings
from rdzv.keys import JobKeys
from rdzv.store.access import Access
from rdzv.store.embedded import EmbeddedServer
from rdzv.store.opening import open_store
from rdzv.watching import Mirror, Watching


@asynccontextmanager
async def following(settings: Settings, rounds: Rounds) -> AsyncIterator[str]:
    """Serve a store or use the user's, and let ``rounds`` follow the job; gives its endpoints."""
    async with AsyncExitStack() as stack:
        access = settings.access
        if access is None:
            server = await stack.enter_async_context(EmbeddedServer("127.0.0.1:0"))
            access = Access((server.endpoint,))
        store = open_store(access)
        stack.push_async_callback(store.close)
        mirror = Mirror(JobKeys(settings.namespace, settings.job).prefix, time.monotonic)
        stack.callback(mirror.subscribe(rounds.take_in))
        watching = asyncio.create_task(Watching(store, mirror).run(), name="watch")
        try:
            yield ",".join(access.endpoints)
        finally:
            watching.cancel()
            await asyncio.wait({watching})
