# SPDX-License-Identifier: Apache-2.0
"""The store of a run: an embedded one or the user's etcd, and the client that follows the job."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from console.local.launch.settings import LocalSettings
from console.local.report.rounds import RoundFollower
from rdzv.job import JobClient
from rdzv.keys import JobKeys
from rdzv.store.access import Access
from rdzv.store.memory.server import EmbeddedServer
from rdzv.store.open import open_store


@asynccontextmanager
async def following(settings: LocalSettings, rounds: RoundFollower) -> AsyncIterator[str]:
    """Serve a store or use the user's, and let ``rounds`` follow the job; yield its endpoints."""
    async with AsyncExitStack() as stack:
        access = settings.access
        if access is None:
            server = await stack.enter_async_context(EmbeddedServer("127.0.0.1:0"))
            access = Access((server.endpoint,))
        store = open_store(access)
        stack.push_async_callback(store.close)
        keys = JobKeys(settings.namespace, settings.job)
        client = JobClient.of(store, keys, clock=time.monotonic)
        stack.callback(client.mirror.subscribe(rounds.take_in))
        await stack.enter_async_context(client.following())
        yield ",".join(access.endpoints)
