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
import struct
from collections.abc import Callable
from struct import Struct

from agent.tunnel.connections import READ_SIZE, Ends
from agent.tunnel.identity import TunnelIdentity, pin_of
from rdzv.errors import LauncherError
from rdzv.records.job import Member

PATH_IDLE_S, PATH_INTERVAL_S, PATH_TRIES = 15, 5, 6
"""Keep-alive of the kernels, in seconds: a path that has gone dead is noticed after 45 s, even if
both ends are members."""
LOST_S = PATH_IDLE_S + PATH_INTERVAL_S * PATH_TRIES

_TCP_INFO = struct.Struct("@8B13I")
"""The start of Linux's ``struct tcp_info``."""
_UNACKNOWLEDGED, _MS_SINCE_ACKNOWLEDGEMENT = 8 + 4, 8 + 12


def notice_lost_path(connection: socket.socket) -> None:
    """Have the kernel end the connection when its path is gone, and send small frames at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PATH_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PATH_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PATH_TRIES)


async def unacknowledged_for_long(connection: socket.socket) -> None:
    """Wait until what was sent has had no acknowledgement for ``LOST_S``.

    The kernel sends no keep-alive then, but what was sent, again and again, for 15 minutes. Its
    ``TCP_USER_TIMEOUT`` would shorten that, but also ends a connection whose peer does not read;
    such a peer acknowledges each probe. Raises ``OSError`` if the connection is closed.
    """
    # The kernel has no notification of it: poll.
    while not _is_unacknowledged(connection):  # noqa: ASYNC110
        await asyncio.sleep(PATH_INTERVAL_S)


def _is_unacknowledged(connection: socket.socket) -> bool:
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    info: tuple[int, ...] = _TCP_INFO.unpack(told)
    return info[_UNACKNOWLEDGED] > 0 and info[_MS_SINCE_ACKNOWLEDGEMENT] >= 1000 * LOST_S


MAGIC = b"muster/1"
CERTIFICATE_MAX = 1024
"""Longest certificate in bytes: three times the size of Muster's own."""

_HEAD = Struct(f">{len(MAGIC)}sH")
HEAD_SIZE = _HEAD.size


class HelloError(LauncherError):
    """Bytes that are no hello: one sentence why."""


def encode_hello(certificate: bytes) -> bytes:
    """Encode the message for one certificate in DER."""
    return _HEAD.pack(MAGIC, len(certificate)) + certificate


def read_head(head: bytes) -> int:
    """Return the length of the certificate that follows; raise ``HelloError`` if it is invalid."""
    magic, length = _HEAD.unpack(head)
    if magic != MAGIC:
        raise HelloError("it began with no certificate")
    if not 1 <= length <= CERTIFICATE_MAX:
        raise HelloError(f"it began with a certificate of {length} bytes")
    return int(length)


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
