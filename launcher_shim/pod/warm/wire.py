# SPDX-License-Identifier: Apache-2.0
"""Messages between the stub that torchrun starts and the zygote: JSON behind its length.

The first one carries the stub's three standard files.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from typing import Any, Dict, List, Sequence, Tuple

OVERRIDE = "PYTHON_EXEC"
"""torchrun's variable for the program that it starts as a worker's interpreter."""
TRIAL = "--muster-trial"
"""The argument with which the stub ends at once, with 0."""

MESSAGE_MAX = 8 * 1024 * 1024
"""More than the kernel lets a process start with."""
FILES = 3
_HEAD = struct.Struct("<I")


class Unsaid(Exception):
    """The other side has closed the connection, or sent no message."""


def beside(stub: str) -> str:
    """Return the path of the zygote's socket, by that of the stub."""
    return os.path.join(os.path.dirname(stub), "socket")


def encode(message: Dict[str, Any]) -> bytes:
    """Return one message without files."""
    text = json.dumps(message).encode()
    return _HEAD.pack(len(text)) + text


def send(line: socket.socket, message: Dict[str, Any], files: Sequence[int] = ()) -> None:
    """Send one message; raises ``OSError``."""
    text = encode(message)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    line.sendmsg([text[: _HEAD.size]], rights)
    line.sendall(text[_HEAD.size :])


def receive(line: socket.socket) -> Tuple[Dict[str, Any], List[int]]:
    """Receive one message with the files that it carries; raises ``Unsaid`` and ``OSError``.

    The files are the caller's to close.
    """
    head, rights, _, _ = line.recvmsg(
        _HEAD.size, socket.CMSG_SPACE(FILES * array.array("i").itemsize), socket.MSG_WAITALL
    )
    files = array.array("i")
    for level, kind, data in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
    try:
        return _message(line, head), list(files)
    except (Unsaid, OSError):
        for file in files:
            os.close(file)
        raise


def _message(line: socket.socket, head: bytes) -> Dict[str, Any]:
    if len(head) != _HEAD.size:
        raise Unsaid("no message")
    (size,) = _HEAD.unpack(head)
    if size > MESSAGE_MAX:
        raise Unsaid(f"a message of {size} bytes")
    text = bytearray()
    while len(text) < size:
        more = line.recv(min(65536, size - len(text)))
        if not more:
            raise Unsaid("half a message")
        text += more
    try:
        found = json.loads(bytes(text))
    except ValueError as error:
        raise Unsaid("no JSON") from error
    if not isinstance(found, dict):
        raise Unsaid("no object")
    return found
