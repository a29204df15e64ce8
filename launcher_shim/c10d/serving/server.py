# SPDX-License-Identifier: Apache-2.0
"""The server of the TCPStore protocol for the launchers of this pod, and for no other client.

It listens on both loopback addresses, as torch's client may try either first, and on a unix socket,
for the relay of ``muster-run``. The sessions give the keys their meaning.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

from launcher_shim.c10d.serving.connection import Connection, ConnectionOwner, OpenSession
from launcher_shim.rundir.unix_socket import PathTooLong, nascent_name, publish, withdraw
from launcher_shim.tcpstore.loopback import bind_loopback
from rdzv.errors import ConfigError
from rdzv.flags import named

_logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 256
"""Maximum number of connections. torch opens one for each agent, and in 2.5 one for each worker."""
HANDSHAKE_TIMEOUT_S = 30.0
LAST_WRITES_TIMEOUT_S = 300.0
"""Total time for retries of writes that a client sent before it disconnected, in seconds. Longer
than the longest store outage of the fault matrix (90 s); bounded, because a fenced sidecar can
never write them."""
HELD_MAX = 64 * 1024 * 1024
"""Bytes that all clients together may hold in requests that are not complete yet."""

_ACCEPT_BACKLOG = 256
_CLOSE_TIMEOUT_S = 2.0


class C10dServer:
    """The listeners on loopback and on a unix socket; one session for each client connection.

    ``open_session`` gets a description of the peer, for logs, and the relay that it comes through
    or None. It is called once the client has shown that it speaks the protocol.
    """

    def __init__(
        self,
        open_session: OpenSession,
        *,
        connections_max: int = CONNECTIONS_MAX,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        last_writes_timeout_s: float = LAST_WRITES_TIMEOUT_S,
    ) -> None:
        self._connections_max = connections_max
        self._connections: set[Connection] = set()
        self._closing = False
        self._host = ConnectionOwner(
            open_session,
            self._joined,
            self._left,
            self._shed,
            handshake_timeout_s,
            last_writes_timeout_s,
        )
        self._listeners: list[asyncio.Server] = []
        self._published: tuple[str, int] | None = None

    @property
    def connections(self) -> frozenset[Connection]:
        """The connections that are open now."""
        return frozenset(self._connections)

    async def listen_loopback(self, port: int) -> int:
        """Listen on 127.0.0.1 and, if the machine has it, on ::1; 0 chooses a port.

        Returns the port. Raises ConfigError if it is taken.
        """
        sockets = _bind(port)
        loop = asyncio.get_running_loop()
        # Created and kept without a suspension, so that a cancellation leaves no socket unclosed.
        listeners = [
            await loop.create_server(
                self._connect, sock=bound, backlog=_ACCEPT_BACKLOG, start_serving=False
            )
            for bound in sockets
        ]
        self._listeners += listeners
        for listener in listeners:
            await listener.start_serving()
        return int(sockets[0].getsockname()[1])

    async def listen_unix(self, path: str) -> None:
        """Listen on a unix socket, in the place of an older one at that path.

        Every user of the pod may connect: sidecar and launcher may run as different ones, and
        the pod is one trust domain. Raises ConfigError if the path is too long for a socket.
        """
        try:
            nascent = nascent_name(path)  # event loops unlink the name they bound, at close
        except PathTooLong as error:
            raise ConfigError(f"{named('--run-dir')}: {error}") from error
        loop = asyncio.get_running_loop()
        self._listeners.append(
            await loop.create_unix_server(self._connect, nascent, backlog=_ACCEPT_BACKLOG)
        )
        self._published = path, await asyncio.to_thread(publish, nascent, path, 0o666)

    async def close(self) -> None:
        """Stop listening, cancel requests under way, and close every connection."""
        self._closing = True
        await self._stop_accepting()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        if self._published is not None:
            await asyncio.to_thread(withdraw, *self._published)
            self._published = None
        connections = list(self._connections)
        for connection in connections:
            connection.give_up()
        if connections:
            _, late = await asyncio.wait(
                [connection.gone for connection in connections], timeout=_CLOSE_TIMEOUT_S
            )
            if late:
                _logger.error("%d c10d sessions did not end when cancelled", len(late))

    async def _stop_accepting(self) -> None:
        """Stop accepting, and wait until each accepted client has a connection, to be closed.

        Otherwise it would never be closed. asyncio accepts in one turn of the loop and makes
        connections in the two turns after it.
        """
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            for listening in listener.sockets:
                loop.remove_reader(listening.fileno())
        for _ in range(2):
            await asyncio.sleep(0)

    def _connect(self) -> Connection:
        return Connection(self._host)

    def _joined(self, connection: Connection) -> None:
        self._connections.add(connection)
        if self._closing:
            # Accepted just before the listener was closed.
            connection.give_up()
        elif len(self._connections) > self._connections_max:
            connection.fail(f"there are already {self._connections_max} connections")

    def _left(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def _shed(self) -> None:
        """Close the connection that holds most bytes, if all clients together hold too many."""
        if sum(connection.held for connection in self._connections) > HELD_MAX:
            largest = max(self._connections, key=lambda connection: connection.held)
            largest.fail(f"all clients together hold {HELD_MAX} bytes of unfinished requests")


def _bind(port: int) -> list[socket.socket]:
    """Bind both loopback addresses; raises ``ConfigError`` if the port is taken."""
    try:
        return bind_loopback(port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        if not port:
            raise ConfigError("no port is free on both 127.0.0.1 and ::1") from error
        raise ConfigError(
            f"port {port} of {error.filename} is taken (a torchrun that was started before the"
            " sidecar takes it unless --rdzv-conf says is_host=0); free it or choose another c10d"
            " port"
        ) from error
