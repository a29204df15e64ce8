# SPDX-License-Identifier: Apache-2.0
"""A sidecar's side of the notice socket for tests: it says what the test tells it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

DEADLINE_S = 150.0
"""Ends the wait for a notice that does not come."""


class NoticeServer:
    """``notices`` are those that have come; ``clients`` those that wait."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notices: list[dict[str, Any]] = []
        self.clients: list[asyncio.StreamWriter] = []
        self._came = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Begin to listen, as a sidecar that starts."""
        await asyncio.to_thread(self.path.unlink, missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def die(self) -> None:
        """End as by SIGKILL: the socket's file stays."""
        assert self._server is not None
        self._server.close()
        for client in self.clients:
            client.close()
        self.clients.clear()

    def say(self, phase: str, sentence: str = "", **more: object) -> None:
        """Tell every client; whoever has been told the last word is left."""
        line = json.dumps({"phase": phase, "sentence": sentence, **more}).encode() + b"\n"
        for client in self.clients:
            client.write(line)
            if phase in ("released", "cancelled"):
                client.close()

    async def came(self, count: int = 1) -> None:
        """Wait for so many notices."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.notices) < count:
                self._came.clear()
                await self._came.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.notices.append(json.loads(await reader.readline()))
        self.clients.append(writer)
        self._came.set()


@asynccontextmanager
async def notice_server(run_dir: Path) -> AsyncIterator[NoticeServer]:
    """Listen where a sidecar would."""
    server = NoticeServer(run_dir / "notice.sock")
    await server.listen()
    try:
        yield server
    finally:
        await server.die()
