# SPDX-License-Identifier: Apache-2.0
"""One neighbour of this sidecar: the idle connection to it, and the sign that it is lost, if any.

No byte is sent once it is open, and no process wakes up: the two kernels keep it alive. A peer
whose process stands still is no loss, as its kernel answers; only a machine that is gone, or cut
off, answers nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Protocol
from urllib.parse import quote

from rdzv.pacing import Doubling
from rdzv.peers import Sign
from rdzv.reconcile import Loop, Outlook
from rdzv.records.job import Member

PATH = "/peer/"
"""The page that is never ended: what follows is the member's name."""

CONNECT_TIMEOUT_S = 0.9
"""Time limit for a connection. Less than the second in which a suspicion can be taken back, and
than the first repetition of a lost packet."""

ANSWER_TIMEOUT_S = 5.0
"""Time limit for the answer of a sidecar whose kernel has accepted the connection."""

KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 1,
    socket.TCP_KEEPINTVL: 1,
    socket.TCP_KEEPCNT: 2,
    socket.TCP_USER_TIMEOUT: 2500,
}
"""Options of the connection, in seconds, and the last one in milliseconds: a silent machine is
seen after two to three seconds."""

DIAL_PAUSE = Doubling(1.0, 30.0)
"""Backoff between two attempts to open the line, in seconds."""

STEADY_S = 5.0
"""Age of a line whose end is no failure: the next one is opened at once."""


class PeerAway(Exception):
    """No connection to a peer. ``sign``: of which loss that is a sign."""

    def __init__(self, sign: Sign) -> None:
        super().__init__(sign)
        self.sign = sign


class PeerMute(Exception):
    """A peer whose machine lives, and whose sidecar holds no connection now."""


class IdleLine(Protocol):
    """One idle connection."""

    async def ended(self) -> bool:
        """Wait until it ends; return whether that was silence, and not the other end's doing."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


Dial = Callable[[Member], Awaitable[IdleLine]]
"""Opens a line to a member; raises ``PeerAway`` or ``PeerMute``."""


class TcpLine:
    """A line by TCP.

    No byte is sent once it is open, and no process wakes up.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ended(self) -> bool:
        """Wait until it ends; return whether that was silence, and not the other end's doing."""
        try:
            await self._reader.read(1)  # it sends nothing: any byte is the end
        except ConnectionError:
            return False
        except OSError:
            return True
        return False

    def close(self) -> None:
        """Close it."""
        self._writer.transport.abort()


async def dial(member: Member) -> TcpLine:
    """Open a line to ``member``; raise ``PeerAway`` or ``PeerMute``."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(member.address, member.health_port)
    except ConnectionRefusedError:
        raise PeerAway("refused") from None
    except (OSError, TimeoutError):
        raise PeerAway("silent") from None
    line = TcpLine(reader, writer)
    try:
        keep_alive(writer, KEEP_ALIVE)
        await _greet(reader, writer, member.name)
    except OSError:
        line.close()
        raise PeerMute from None
    except BaseException:
        line.close()
        raise
    return line


def keep_alive(writer: asyncio.StreamWriter, options: Mapping[int, int]) -> None:
    """Let the kernel keep a connection alive, with these options of TCP; raise ``OSError``."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
    """Ask for the page that does not end; raise ``PeerMute`` if it is not given."""
    answer = b""
    with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            writer.write(request(name))
            answer = await reader.readuntil(b"\r\n\r\n")
    if answer.split(b" ")[1:2] != [str(HTTPStatus.OK.value).encode()]:
        raise PeerMute


def request(name: str) -> bytes:
    """Encode the request for the page of the member ``name``."""
    return b"GET %b HTTP/1.1\r\nHost: muster\r\n\r\n" % path_of(name)


def path_of(name: str) -> bytes:
    """Return the path of the page of a member, whose name may be any text in a record."""
    return f"{PATH}{quote(name, safe='')}".encode()


class Neighbour(Loop):
    """One incarnation of one member.

    ``sign``: the sign of its loss, as long as a line that was open has broken and no other one
    could be opened. ``reached``: whether a line was ever open. ``changed`` is called when one of
    them changes.
    """

    def __init__(
        self, member: Member, dial: Dial, clock: Callable[[], float], changed: Callable[[], None]
    ) -> None:
        super().__init__(clock)
        self.member = member
        self.sign: Sign | None = None
        self.reached = False
        self.since_s = clock()
        """Time since which it is a neighbour."""
        self.written = False
        """Whether the present loss was written: once it is taken back, it is not written again."""
        self._dial = dial
        self._failures = 0
        self._changed = changed

    async def step(self) -> Outlook:
        """Keep one line open until it ends; return when to open the next."""
        self._failures += 1
        try:
            line = await self._dial(self.member)
        except PeerAway as away:
            if self.reached:
                self._note(away.sign)
        except PeerMute:
            self._note(None)
        else:
            self.reached = True
            self._note(None)
            if await self._outlast(line) >= STEADY_S:
                self._failures = 0
                return Outlook(again=True)
        return Outlook(look_at_s=self.clock() + DIAL_PAUSE.after(self._failures - 1))

    async def _outlast(self, line: IdleLine) -> float:
        """Wait until the line ends; return how long it was open, in seconds."""
        opened_s = self.clock()
        try:
            if await line.ended():
                self._note("silent")
        finally:
            line.close()
        return self.clock() - opened_s

    def _note(self, sign: Sign | None) -> None:
        if sign is None:
            self.written = False
        self.sign = sign
        self._changed()
