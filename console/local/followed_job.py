# SPDX-License-Identifier: Apache-2.0
"""The job of a run in its store: an embedded one or the user's etcd."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from agent.verdict.view import JobView, present_view
from console.job.outage import cause
from console.local.launch.settings import LocalSettings
from console.local.report.rounds import RoundFollower
from rdzv.job import JobClient
from rdzv.keys import JobKeys
from rdzv.mirror import Mirror
from rdzv.store.access import Access
from rdzv.store.etcd.client import open_store
from rdzv.store.memory.server import EmbeddedServer


class FollowedJob:
    """The job as its client sees it."""

    def __init__(self, endpoints: str, client: JobClient) -> None:
        self.endpoints = endpoints
        self._client = client
        self._seen = (-1, present_view(client))

    @property
    def view(self) -> JobView:
        """The job as the store had it last; built again only after a change."""
        sequence = self._client.mirror.sequence
        if self._seen[0] != sequence:
            self._seen = (sequence, present_view(self._client))
        return self._seen[1]

    @property
    def outage(self) -> str:
        """The reason why the store does not answer; empty while it does, and before the start."""
        mirror = self._client.mirror
        if not mirror.loaded or mirror.healthy(mirror.clock()):
            return ""
        return cause(self._client.watching.trouble)


@asynccontextmanager
async def following(settings: LocalSettings, rounds: RoundFollower) -> AsyncIterator[FollowedJob]:
    """Serve a store or use the user's, and let ``rounds`` follow the job in it."""
    # The run reports an outage as a moment.
    logging.getLogger(Mirror.__module__).setLevel(logging.ERROR)
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
        yield FollowedJob(",".join(access.endpoints), client)
