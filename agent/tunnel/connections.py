# SPDX-License-Identifier: Apache-2.0
"""The connections of one end of the tunnel: their handshake, their first frame, and their end.

Both ends send their certificate in clear, each checks that the other's pin is that of a present
member, and TLS follows, in which each end trusts that one certificate alone. So there is no
authority whose key could be lost, and no certificate is parsed before its digest was found in the
membership. A connection is closed when its peer has long been no member in a healthy watch.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from struct import Struct
from typing import NamedTuple

from agent.tunnel.identity import TunnelIdentity, pin_of
from launcher_shim.rundir.exec_frames import (
    ABANDON,
    HEAD_SIZE,
    Attaching,
    ExecFrameError,
    Frame,
    read_attaching,
    read_head,
)
from rdzv.dataclass import dataclass
from rdzv.errors import LauncherError
from rdzv.reconcile import first_of
from rdzv.records.job import Member

READ_SIZE = 64 * 1024
"""Bytes that are read at once, and held for an end that does not take them."""

PATH_IDLE_S, PATH_INTERVAL_S, PATH_TRIES = 15, 5, 6
"""Keep-alive of the kernels, in seconds: a path that has gone dead is noticed after 45 s, even if
both ends are members."""
LOST_S = PATH_IDLE_S + PATH_INTERVAL_S * PATH_TRIES

_TCP_INFO = struct.Struct("@8B13I")
"""The start of Linux's ``struct tcp_info``."""
_UNACKNOWLEDGED, _MS_SINCE_ACKNOWLEDGEMENT = 8 + 4, 8 + 12

MAGIC = b"muster/1"
CERTIFICATE_MAX = 1024
"""Longest certificate in bytes: three times the size of Muster's own."""

_HELLO_HEAD = Struct(f">{len(MAGIC)}sH")
HELLO_HEAD_SIZE = _HELLO_HEAD.size

HANDSHAKE_TIMEOUT_S = 10.0
"""Time limit until both ends are known, in seconds; a starved node may need some of it."""

OPENING_TIMEOUT_S = 10.0
OPENING_MAX = 1024
"""Longest body of a first frame, in bytes."""

ABSENT_S = 1.5
"""Time for which a healthy watch must miss a member until its commands are given up, in seconds: a
member whose lease expired while it was busy registers again at once. Together with the second by
which a store may notice an expired lease late, and the grace of a worker that is killed, it is
within ``launcher_shim.rundir.exec_frames.MARGIN_S``: no worker outlives its launcher by more than
the lease and that."""

ABSENCE_LOOK_S = 0.25
"""Poll interval while a member is missed, besides the looks at each change, in seconds."""

RETURN_S = 15.0
"""Time after a gap in the watch for which no member is given up, in seconds: what hid the store
from here may have hidden it from all until their leases expired, and then each registers again in
its own time."""


class Ends(NamedTuple):
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


async def relay(one: Ends, other: Ends, patience_s: float = 0.0) -> bool:
    """Carry bytes until one of the two has ended; the other has been sent what came before.

    Returns whether ``other`` has ended: it is waited for ``patience_s`` longer.
    """
    back = asyncio.create_task(_copy(other.reader, one.writer))
    try:
        await first_of(_copy(one.reader, other.writer), asyncio.shield(back))
        await asyncio.wait((back,), timeout=patience_s)
        return back.done()
    finally:
        back.cancel()
        await asyncio.gather(back, return_exceptions=True)
        for ends in (one, other):
            ends.writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # a connection that breaks has ended
        while data := await reader.read(READ_SIZE):
            writer.write(data)
            await writer.drain()


class Connections:
    """The open connections, each with the member at its other end once that is known."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[object], asyncio.StreamWriter | None] = {}
        self._peers: dict[asyncio.StreamWriter, Member] = {}

    @property
    def carrying(self) -> int:
        """The number of connections that carry a command."""
        return len(self._peers)

    @contextmanager
    def kept(self, writer: asyncio.StreamWriter | None = None) -> Iterator[None]:
        """Track the current task, and close ``writer`` at its end."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = writer
        try:
            yield
        finally:
            del self._tasks[task]
            if writer is not None:
                writer.close()

    @contextmanager
    def to(self, member: Member, writer: asyncio.StreamWriter) -> Iterator[None]:
        """Track the member that ``writer`` leads to, and close ``writer`` at the end."""
        self._peers[writer] = member
        try:
            yield
        finally:
            del self._peers[writer]
            writer.close()

    def close_unless(self, present: Callable[[Member], bool]) -> list[Member]:
        """Close the connections whose peer is not present; return the peers of those."""
        gone = [(writer, one) for writer, one in self._peers.items() if not present(one)]
        for writer, _ in gone:
            writer.transport.abort()  # the peer may never take what is still to be sent
        return [member for _, member in gone]

    async def end(self) -> None:
        """Close all connections, and wait until their tasks have ended."""
        for writer in (*self._tasks.values(), *self._peers):
            if writer is not None:
                writer.transport.abort()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
    state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    info: tuple[int, ...] = _TCP_INFO.unpack(state)
    return info[_UNACKNOWLEDGED] > 0 and info[_MS_SINCE_ACKNOWLEDGEMENT] >= 1000 * LOST_S


class HelloError(LauncherError):
    """Bytes that are no hello: one sentence why."""


def encode_hello(certificate: bytes) -> bytes:
    """Encode the message for one certificate in DER."""
    return _HELLO_HEAD.pack(MAGIC, len(certificate)) + certificate


def read_hello_head(head: bytes) -> int:
    """Return the length of the certificate that follows; raise ``HelloError`` if it is invalid."""
    magic, length = _HELLO_HEAD.unpack(head)
    if magic != MAGIC:
        raise HelloError("it began with no certificate")
    if not 1 <= length <= CERTIFICATE_MAX:
        raise HelloError(f"it began with a certificate of {length} bytes")
    return int(length)


class HandshakeError(LauncherError):
    """A peer that was not there, or did not prove who it is: one sentence why."""


class UnknownSidecar(HandshakeError):
    """A sidecar that is there, but does not know this one, or is not the one that was called.

    Until the store is back, it is so for a sidecar that has started since.
    """


async def call_peer(member: Member, own: TunnelIdentity) -> Ends:
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


async def answer_peer(
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
    return await _receive(connection, read_hello_head(await _receive(connection, HELLO_HEAD_SIZE)))


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


class OpeningError(LauncherError):
    """A missing or invalid first frame; one sentence why."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The first frame, to be passed on unchanged, and what it says."""

    attaching: Attaching
    abandons: bool
    frame: bytes


async def read_opening(reader: asyncio.StreamReader) -> Opening:
    """Read the first frame; raise ``OpeningError``, or ``OSError`` if the connection breaks."""
    try:
        async with asyncio.timeout(OPENING_TIMEOUT_S):
            head = await reader.readexactly(HEAD_SIZE)
            kind, length, number = read_head(head)
            if length > OPENING_MAX:
                raise OpeningError(f"its first frame has {length} bytes")
            body = await reader.readexactly(length)
        attaching = read_attaching(Frame(kind, body, number))
    except TimeoutError as error:
        raise OpeningError("no first frame came in time") from error
    except asyncio.IncompleteReadError as error:
        raise OpeningError("it ended before its first frame") from error
    except ExecFrameError as error:
        raise OpeningError(str(error)) from error
    return Opening(attaching, kind == ABANDON, head + body)


class Absence:
    """The absence of one member, which counts as gone after ``limit_s``."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since_s: float | None = None

    def over(self) -> None:
        """Note that the member is present."""
        self._since_s = None

    def lasts(self, now: float, healthy_for_s: float) -> bool:
        """Note that the member is absent at ``now``; return whether it counts as gone.

        ``healthy_for_s``: for how long the watch has had no gap. It counts as gone only if that is
        ``RETURN_S`` or more.
        """
        if self._since_s is None:
            self._since_s = now
        return now - self._since_s >= self._limit_s and healthy_for_s >= RETURN_S
