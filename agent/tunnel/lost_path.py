# SPDX-License-Identifier: Apache-2.0
"""Notices that the path of a connection carries nothing any more, by what the kernels know of it.

The kernels probe each other, so that a starved sidecar does not count as gone, nor one that does
not read.
"""

from __future__ import annotations

import asyncio
import socket
import struct

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
