# SPDX-License-Identifier: Apache-2.0
"""What commands about drains are tried on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rdzv.store.memory.server import EmbeddedServer
from tests.support.sidecars.drains import Job, job
from tests.support.sidecars.processes import PATIENT, Ended, muster, started

LEASE_TTL_S = 600.0
"""No member is to lose its lease here, whatever time the commands take."""


class Terminal:
    """Where commands about one job are given."""

    def __init__(self, one: Job, endpoint: str) -> None:
        self.one = one
        self.environ = {
            "MUSTER_ETCD_ENDPOINTS": endpoint,
            "MUSTER_NAMESPACE": "team",
            "MUSTER_JOB": "digits",
        }

    async def command(self, *arguments: str) -> Ended:
        return await muster(*arguments, **self.environ)

    async def drain(self, *arguments: str) -> Ended:
        return await self.command("drain", *arguments)

    async def status(self, *arguments: str) -> Ended:
        return await self.command("status", *arguments)

    async def history(self) -> Ended:
        return await self.command("history")

    @asynccontextmanager
    async def begun_drain(
        self, *arguments: str, runner: tuple[str, ...] = PATIENT
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """Begin a drain whose lines are read as they come; end it with the block."""
        process = await started(("drain", *arguments), self.environ, runner)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()


@asynccontextmanager
async def terminal(names: str = "ab", **options: Any) -> AsyncIterator[Terminal]:
    """A terminal beside a job; ``options`` are those of ``job``."""
    async with (
        job(names, **options, lease_ttl_s=LEASE_TTL_S) as one,
        EmbeddedServer(engine=one.engine) as server,
    ):
        yield Terminal(one, server.endpoint)
