# SPDX-License-Identifier: Apache-2.0
"""``shards.sock`` in the run directory: the ranks of this pod ask for shards, a line at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from agent.rundir.pod_socket import PodSocket
from agent.shards.request import LINE_BYTES_MAX, ShardReply, ShardRequest
from rdzv.errors import RecordError

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 256
"""The ranks of one pod, and some to spare; a connection beyond them is closed, and retried."""


class ShardSocket:
    """A server on the socket ``path``; None: do not listen. ``answer`` answers one request."""

    def __init__(
        self, path: Path | None, answer: Callable[[ShardRequest], Awaitable[ShardReply]]
    ) -> None:
        self.answer = answer
        self._socket = PodSocket(
            path, self._serve, limit=LINE_BYTES_MAX, connections_max=CONNECTIONS_MAX
        )

    async def run(self) -> None:
        """Serve until cancelled; raise ``ConfigError`` if the path is too long for a socket."""
        await self._socket.run()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A client that disconnects loses nothing: its next request says everything again.
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                reply = await self._reply(reader)
                writer.write(reply.line())
                await writer.drain()

    async def _reply(self, reader: asyncio.StreamReader) -> ShardReply:
        try:
            request = ShardRequest.from_line(await reader.readuntil(b"\n"))
        except asyncio.LimitOverrunError as error:
            raise ConnectionAbortedError(f"a request without end: {error}") from error
        except RecordError as error:
            log.warning("a request is refused: %s", error, extra={"event": "shards_refused"})
            return ShardReply(refused=str(error))
        return await self.answer(request)
