# SPDX-License-Identifier: Apache-2.0
"""``shards.sock`` in the run directory: the ranks of this pod ask for shards, a line at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from agent.shards.request import LINE_BYTES_MAX, ShardReply, ShardRequest
from launcher_shim.rundir.unix_socket import PathTooLong, nascent_name, publish
from rdzv.errors import ConfigError, RecordError
from rdzv.flags import named

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 256
"""Ranks of one pod, and some to spare; who comes after is turned away, and comes again."""


class ShardSocket:
    """Listens on ``path``; None: do not listen. ``answer`` answers one request."""

    def __init__(
        self, path: Path | None, answer: Callable[[ShardRequest], Awaitable[ShardReply]]
    ) -> None:
        self.listening = asyncio.Event()
        self._path = path
        self._answer = answer
        self._clients: dict[asyncio.Task[object], asyncio.StreamWriter] = {}

    async def run(self) -> None:
        """Serve until cancelled; raises ``ConfigError`` if the path is too long for a socket."""
        if self._path is None:
            self.listening.set()
            await asyncio.Event().wait()
        else:
            await self._serve(self._path)

    async def _serve(self, path: Path) -> None:
        try:
            nascent = nascent_name(str(path))
        except PathTooLong as error:
            raise ConfigError(f"{named('--run-dir')}: {error}") from error
        await asyncio.to_thread(Path(nascent).unlink, missing_ok=True)
        server = await asyncio.start_unix_server(self._serve_rank, nascent, limit=LINE_BYTES_MAX)
        try:
            # Any user of the pod may train: it can do no more than a rank of this pod can.
            await asyncio.to_thread(publish, nascent, str(path), 0o666)
            self.listening.set()
            await asyncio.Event().wait()
        finally:
            server.close()
            # Each sees its connection end; a task of asyncio's server is not to be cancelled.
            for writer in self._clients.values():
                writer.close()
            await asyncio.gather(*self._clients, return_exceptions=True)

    async def _serve_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients[task] = writer
        try:
            # Who goes away has asked for nothing that its next request would not tell.
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                if len(self._clients) <= CONNECTIONS_MAX:
                    while True:
                        reply = await self._reply(reader)
                        writer.write(reply.line())
                        await writer.drain()
        finally:
            del self._clients[task]
            writer.close()

    async def _reply(self, reader: asyncio.StreamReader) -> ShardReply:
        try:
            request = ShardRequest.from_line(await reader.readuntil(b"\n"))
        except asyncio.LimitOverrunError as error:
            raise ConnectionAbortedError(f"a request without end: {error}") from error
        except RecordError as error:
            log.warning("a request is refused: %s", error, extra={"event": "shards_refused"})
            return ShardReply(refused=str(error))
        return await self._answer(request)
