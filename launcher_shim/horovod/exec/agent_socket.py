# SPDX-License-Identifier: Apache-2.0
"""The agent's socket in the run directory, for the agent's own user and the sidecar's."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import List

from launcher_shim.horovod.exec.frames import Decoder, Frame
from launcher_shim.rundir.unix_socket import nascent_name, publish

OPENING_TIMEOUT_S = 10.0
READ_SIZE = 64 * 1024

_CREDENTIALS = struct.Struct("3i")


def listen(path: Path) -> socket.socket:
    """Open a listening socket at ``path``, where it appears only once it listens.

    Every user may connect; ``may_command`` decides which of them may use it.
    """
    nascent = nascent_name(str(path))
    with suppress(FileNotFoundError):
        os.unlink(nascent)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(nascent)
    listener.listen(64)
    listener.setblocking(False)
    publish(nascent, str(path), 0o666)
    return listener


def may_command(connection: socket.socket, delivered: Path) -> bool:
    """Return whether the peer runs as this user, as root, or as the sidecar.

    The sidecar's user is the owner of ``delivered``: by the ``PATH`` and ``PYTHONPATH`` in that
    file, it decides what runs here anyway.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    if uid in (os.geteuid(), 0):
        return True
    try:
        found = delivered.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == uid


async def first_frames(reader: asyncio.StreamReader, decoder: Decoder) -> List[Frame]:
    """Read the first frame of a connection, and those that came with it.

    Raises ``ExecFrameError``, ``ConnectionError`` if the peer is gone, or ``asyncio.TimeoutError``
    after ``OPENING_TIMEOUT_S``.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + OPENING_TIMEOUT_S
    while True:
        data = await asyncio.wait_for(reader.read(READ_SIZE), deadline_s - loop.time())
        if not data:
            raise ConnectionError("disconnected before its first frame")
        frames = decoder.feed(data)
        if frames:
            return frames
