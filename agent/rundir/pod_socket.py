# SPDX-License-Identifier: Apache-2.0
"""A unix socket in the run directory, for every user of the pod: served until cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from launcher_shim.rundir.layout import PathTooLong, nascent_name, publish_socket
from rdzv.errors import ConfigError
from rdzv.sentences import named

ServeConnection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening_at(path: Path, serve: ServeConnection, limit: int) -> AsyncIterator[None]:
    """Listen on ``path`` for as long as the block lasts; connections outlive it.

    A client that finds the socket can connect to it. ``limit`` is asyncio's, in bytes. Raises
    ``ConfigError`` if the path is too long for a socket.
    """
    try:
        nascent = nascent_name(str(path))
    except PathTooLong as error:
        raise ConfigError(f"{named('--run-dir')}: {error}") from error
    await asyncio.to_thread(Path(nascent).unlink, missing_ok=True)
    server = await asyncio.start_unix_server(serve, nascent, limit=limit)
    try:
        # The containers of a pod have different users, and no other pod has this directory.
        await asyncio.to_thread(publish_socket, nascent, str(path), 0o666)
        yield
    finally:
        server.close()


class PodSocket:
    """A server on the socket ``path``; None: it does not listen.

    ``serve`` has a connection until it returns. Connections beyond ``connections_max`` at once are
    closed. ``limit`` is asyncio's, in bytes.
    """

    def __init__(
        self, path: Path | None, serve: ServeConnection, *, limit: int, connections_max: int
    ) -> None:
        self.listening = asyncio.Event()
        self._path = path
        self._serve = serve
        self._limit = limit
        self._connections_max = connections_max
        self._clients: dict[asyncio.Task[object], asyncio.StreamWriter] = {}

    async def run(self) -> None:
        """Serve until cancelled; raise ``ConfigError`` if the path is too long for a socket."""
        if self._path is None:
            self.listening.set()
            await asyncio.Event().wait()
            return
        try:
            async with listening_at(self._path, self._connected, self._limit):
                self.listening.set()
                await asyncio.Event().wait()
        finally:
            # Each task sees its connection end; a task of asyncio's server must not be cancelled.
            for writer in self._clients.values():
                writer.close()
            await asyncio.gather(*self._clients, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients[task] = writer
        try:
            if len(self._clients) <= self._connections_max:
                await self._serve(reader, writer)
        finally:
            del self._clients[task]
            writer.close()
