# SPDX-License-Identifier: Apache-2.0
"""One sidecar's end of the tunnel, and the effect of membership changes on it."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from agent.tunnel.launcher_end import LauncherEnd
from agent.tunnel.peers import is_present
from agent.tunnel.worker_end import WorkerEnd
from rdzv.job import JobClient
from rdzv.members.registrar import Registrar
from rdzv.reconcile import Loop, Outlook

log = logging.getLogger(__name__)


class Tunnel(Loop):
    """The server of ``end``, which closes its connections to pods that are no longer members.

    None: this pod has no tunnel.
    """

    def __init__(
        self, client: JobClient, registrar: Registrar, end: LauncherEnd | WorkerEnd | None
    ) -> None:
        super().__init__()
        self._client = client
        self._registrar = registrar
        self._end = end
        self._nothing_to_await = asyncio.Event()
        self._nothing_to_await.set()

    @property
    def listening(self) -> asyncio.Event:
        """The event that is set once it listens; always set if there is no end."""
        return self._nothing_to_await if self._end is None else self._end.listening

    @property
    def carrying(self) -> int:
        """The number of commands that go through it now."""
        return 0 if self._end is None else self._end.carrying

    @property
    def serves(self) -> bool:
        """Whether this pod takes commands."""
        return isinstance(self._end, WorkerEnd)

    async def until_agent(self) -> None:
        """Wait until a command could be started here; return at once if this pod takes none."""
        if isinstance(self._end, WorkerEnd):
            await self._end.until_agent()

    async def run(self) -> None:
        """Serve until cancelled; raise ``ConfigError`` if it cannot listen."""
        if self._end is None:
            await asyncio.Event().wait()
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._end.run(), name="tunnel-end")
            tasks.create_task(super().run(), name="tunnel-peers")

    async def step(self) -> Outlook:
        """Close the connections of those that are no longer members."""
        snapshot, generation = self._client.membership.snapshot(), self._registrar.generation
        # An unregistered sidecar knows nothing newer.
        if self._end is not None and generation is not None:
            present = partial(is_present, snapshot, generation)
            for member in self._end.connections.close_unless(present):
                log.warning(
                    "closed a connection of the tunnel: %s is no longer a member",
                    member.name,
                    extra={"event": "tunnel_closed"},
                )
        return Outlook(partial(self._client.membership.changed_from, snapshot))
