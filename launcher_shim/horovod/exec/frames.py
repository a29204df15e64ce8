# SPDX-License-Identifier: Apache-2.0
"""What the launcher's side of a remote command and the agent beside the workers say, as frames.

A frame is the length of what follows (4 bytes, big-endian), one byte for its kind, and a body.
The launcher's side sends one START and then signs of life; the agent answers with output, signs
of life, and at the end one EXIT or REFUSED. No sockets here.
"""

from __future__ import annotations

import json
from struct import Struct
from typing import NamedTuple

START = 1
"""To the agent: JSON with ``host`` and ``command``, the shell text that horovodrun made."""
ALIVE = 2
"""Both ways, empty: the sender runs."""
STDOUT = 3
STDERR = 4
EXIT = 5
"""From the agent: the command's status as a shell tells it, in decimal."""
REFUSED = 6
"""From the agent: why the command was not started, one sentence."""
GONE = 7
"""From a sidecar on the way: why nobody knows how the command ends, one sentence."""

ALIVE_INTERVAL_S = 1.0
SILENCE_S = 10.0
"""Who has heard nothing for so long takes the other side for gone."""

BODY_MAX = 512 * 1024
"""Longest body in bytes: a command with its environment fits in 128 KiB, twice that as JSON."""

_HEAD = Struct(">IB")
HEAD_SIZE = _HEAD.size
_KINDS = frozenset((START, ALIVE, STDOUT, STDERR, EXIT, REFUSED, GONE))


class ExecFrameError(ValueError):
    """Bytes that are no frame, or a body that is not what its kind says: one sentence why."""


class Frame(NamedTuple):
    """One frame."""

    kind: int
    body: bytes = b""


class Start(NamedTuple):
    """What a START says."""

    host: str
    command: str


class Decoder:
    """Turns bytes into frames, however they were cut up on the way."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Frame]:
        """Every frame that is complete now; raises ``ExecFrameError``."""
        rest = self._rest + data
        frames = []
        while len(rest) >= _HEAD.size:
            kind, length = read_head(rest)
            end = _HEAD.size + length
            if len(rest) < end:
                break
            frames.append(Frame(kind, rest[_HEAD.size : end]))
            rest = rest[end:]
        self._rest = rest
        return frames


def read_head(data: bytes) -> tuple[int, int]:
    """Kind of the frame that begins here, and the length of its body; raises ``ExecFrameError``."""
    length, kind = _HEAD.unpack_from(data)
    if kind not in _KINDS:
        raise ExecFrameError("there is no frame of kind %d" % kind)
    if not 1 <= length <= BODY_MAX + 1:
        raise ExecFrameError("a frame of %d bytes is too long or too short" % length)
    return kind, length - 1


def encode(kind: int, body: bytes = b"") -> bytes:
    """One frame as bytes; raises ``ExecFrameError`` for a body that is too long."""
    if len(body) > BODY_MAX:
        raise ExecFrameError("a body of %d bytes is longer than %d" % (len(body), BODY_MAX))
    return _HEAD.pack(len(body) + 1, kind) + body


def encode_start(host: str, command: str) -> bytes:
    """A START frame; raises ``ExecFrameError`` for a command that is too long."""
    return encode(START, json.dumps({"host": host, "command": command}).encode())


def read_start(body: bytes) -> Start:
    """Read the body of a START; raises ``ExecFrameError``."""
    try:
        fields = json.loads(body)
        start = Start(fields["host"], fields["command"])
    except (ValueError, KeyError, TypeError) as error:
        raise ExecFrameError("a start without host or command") from error
    if not isinstance(start.host, str) or not isinstance(start.command, str):
        raise ExecFrameError("a start whose host or command is no text")
    return start


def read_status(body: bytes) -> int:
    """Read the body of an EXIT, 0 to 255; raises ``ExecFrameError``."""
    if not body.isdigit() or not 0 <= int(body[:4]) <= 255 or len(body) > 3:
        raise ExecFrameError("an exit whose status is not a number from 0 to 255")
    return int(body)
