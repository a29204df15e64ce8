# SPDX-License-Identifier: Apache-2.0
"""The handshake: turns a TCP connection into one whose two ends have proved who they are.

Both ends send their certificate in clear, each checks that the other's pin is that of a present
member, and TLS follows, in which each end trusts that one certificate alone. So there is no
authority whose key could be lost, and no certificate is parsed before its digest was found in the
membership.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from agent.tunnel.hello import HEAD_SIZE, HelloError, encode_hello, read_head
from agent.tunnel.identity import TunnelIdentity, pin_of
from agent.tunnel.lost_path import LOST_S, notice_lost_path
from agent.tunnel.relay import READ_SIZE, Ends
from rdzv.errors import LauncherError
from rdzv.records.job import Member

HANDSHAKE_TIMEOUT_S = 10.0
"""Time limit until both ends are known, in seconds; a starved node may need some of it."""


class HandshakeError(LauncherError):
    """A peer that was not there, or did not prove who it is: one sentence why."""


class UnknownSidecar(HandshakeError):
    """A sidecar that is there, but does not know this one, or is not the one that was called.

    Until the store is back, it is so for a sidecar that has started since.
    """


async def call(member: Member, own: TunnelIdentity) -> Ends:
    """Connect to the sidecar of ``member``; raise ``HandshakeError`` if that fails.

    Raises ``UnknownSidecar`` if one is there.
    """
    connection = _tcp_socket(member.address)
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, (member.address, member.tunnel_port))
            await loop.sock_sendall(connection, encode_hello(own.certificate))
            theirs = await _receive_hello(connection)
            if pin_of(theirs) != member.pin:
                raise UnknownSidecar(f"at its address is not the sidecar of {member.name}")
            return await _start_tls(connection, own, theirs, server=False)
    except HelloError as error:
        connection.close()
        raise UnknownSidecar(str(error)) from error
    except OSError as error:
        connection.close()
        raise HandshakeError(_reason(error)) from error
    except BaseException:
        connection.close()
        raise


async def answer(
    connection: socket.socket, own: TunnelIdentity, known: Callable[[str], Member]
) -> tuple[Ends, Member]:
    """Identify the peer that has connected; ``known`` returns the member of a pin, or raises.

    Raises ``HandshakeError`` or what ``known`` raises; then the connection is closed.
    """
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            loop = asyncio.get_running_loop()
            theirs = await _receive_hello(connection)
            member = known(pin_of(theirs))
            await loop.sock_sendall(connection, encode_hello(own.certificate))
            return await _start_tls(connection, own, theirs, server=True), member
    except (OSError, HelloError) as error:
        connection.close()
        raise HandshakeError(_reason(error)) from error
    except BaseException:
        connection.close()
        raise


async def _receive_hello(connection: socket.socket) -> bytes:
    return await _receive(connection, read_head(await _receive(connection, HEAD_SIZE)))


async def _receive(connection: socket.socket, size: int) -> bytes:
    """Read exactly ``size`` bytes: what follows belongs to TLS. Raise ``HelloError`` at EOF."""
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < size:
        data = await loop.sock_recv(connection, size - len(received))
        if not data:
            raise HelloError("it closed the connection without a whole hello")
        received += data
    return received


async def _start_tls(
    connection: socket.socket, own: TunnelIdentity, trusted: bytes, *, server: bool
) -> Ends:
    loop = asyncio.get_running_loop()
    context = await asyncio.to_thread(own.context, trusted, server=server)
    reader = asyncio.StreamReader(limit=READ_SIZE)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport: asyncio.Transport
    if server:
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, connection, ssl=context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
        )
    else:
        transport, _ = await loop.create_connection(
            lambda: protocol,
            sock=connection,
            ssl=context,
            server_hostname="",
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
        )
    return Ends(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


def _tcp_socket(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    notice_lost_path(connection)
    # What a launcher's side sends is taken soon, so that this does not hit a peer that is only
    # slow.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_S)
    return connection


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing came within {HANDSHAKE_TIMEOUT_S:g} s"
    if isinstance(error, ssl.SSLError):
        return f"it does not hold the key of its certificate ({error.reason or 'no TLS'})"
    return str(error)
