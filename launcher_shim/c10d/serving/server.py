# SPDX-License-Identifier: Apache-2.0
"""Serves the TCPStore protocol to the launchers of this pod, and to nobody else.

It listens on both loopback addresses, for torch's client may try either first, and on a unix
socket, for the relay of ``muster-run``. What a key means is the business of the sessions.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from contextlib import suppress
from typing import Final

from launcher_shim.c10d.serving.connection import Connection, Host
from launcher_shim.c10d.serving.served import OpenSession
from rdzv.errors import ConfigError

_logger = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 256
"""torch opens one connection for each agent, and in 2.5 one for each worker."""
HANDSHAKE_TIMEOUT_S: Final = 30.0
LAST_WRITES_TIMEOUT_S: Final = 300.0
"""How long to retry writes that a client sent before it disconnected. Longer than the longest store
outage of the fault matrix (90 s); bounded, because a fenced sidecar can never write them."""
HELD_MAX: Final = 64 * 1024 * 1024
"""Bytes that all clients together may hold in requests that are not complete yet."""

_ACCEPT_BACKLOG = 256
_CLOSE_TIMEOUT_S = 2.0
_PORT_TRIES = 16
_UNIX_PATH_MAX = 107
_NO_IPV6 = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT})


class C10dServer:
    """Listens on loopback and on a unix socket; one session for each client connection.

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
        self._host = Host(
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
        """Listen on 127.0.0.1 and, where the machine has it, on ::1; 0 chooses a port.

        Returns the port. Raises ConfigError if it is taken.
        """
        sockets = _bind_loopback(port)
        loop = asyncio.get_running_loop()
        # Taken over in one go, so that to be cancelled amid it leaves no socket to nobody.
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
        nascent = f"{path}.{os.getpid()}"  # event loops unlink the name they bound, at close
        if len(os.fsencode(nascent)) > _UNIX_PATH_MAX:
            raise ConfigError(
                f"the socket path {path!r} is too long for unix; choose a shorter run directory"
            )
        loop = asyncio.get_running_loop()
        self._listeners.append(
            await loop.create_unix_server(self._connect, nascent, backlog=_ACCEPT_BACKLOG)
        )
        self._published = path, await asyncio.to_thread(_publish, nascent, path)

    async def close(self) -> None:
        """Stop listening, cancel what is under way, and close every connection."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        if self._published is not None:
            await asyncio.to_thread(_withdraw, *self._published)
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

    def _connect(self) -> Connection:
        return Connection(self._host)

    def _joined(self, connection: Connection) -> None:
        self._connections.add(connection)
        if len(self._connections) > self._connections_max:
            connection.fail(f"there are already {self._connections_max} connections")

    def _left(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def _shed(self) -> None:
        """If all clients together hold too much, close the one that holds most."""
        if sum(connection.held for connection in self._connections) > HELD_MAX:
            largest = max(self._connections, key=lambda connection: connection.held)
            largest.fail(f"all clients together hold {HELD_MAX} bytes of unfinished requests")


def _bind_loopback(port: int) -> list[socket.socket]:
    """Bind 127.0.0.1 and, where there is one, ::1 to the same port."""
    for _ in range(_PORT_TRIES):
        first = _bind(socket.AF_INET, "127.0.0.1", port)
        try:
            return [first, _bind(socket.AF_INET6, "::1", first.getsockname()[1])]
        except ConfigError:
            first.close()
            if port:
                raise
        except OSError as problem:
            if problem.errno in _NO_IPV6:
                _logger.debug("No ::1 here: %s", problem)
                return [first]
            first.close()
            raise
    raise ConfigError("no port is free on both 127.0.0.1 and ::1")


def _bind(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((address, port))
    except OSError as problem:
        bound.close()
        if problem.errno != errno.EADDRINUSE:
            raise
        raise ConfigError(
            f"port {port} of {address} is taken (a torchrun that was started before the sidecar "
            "takes it unless --rdzv-conf says is_host=0); free it or choose another c10d port"
        ) from problem
    return bound


def _publish(nascent: str, path: str) -> int:
    """Open the socket to every user of the pod and put it into place; return its inode."""
    os.chmod(nascent, 0o666)
    os.rename(nascent, path)
    return os.stat(path).st_ino


def _withdraw(path: str, inode: int) -> None:
    """Remove our socket, but not that of a successor."""
    with suppress(FileNotFoundError):
        if os.stat(path).st_ino == inode:
            os.unlink(path)
