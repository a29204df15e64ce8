# SPDX-License-Identifier: Apache-2.0
"""The frames between the launcher's side of a remote command and the agent beside the workers.

A frame is the length of its body (4 bytes, big-endian), one byte for its kind, a number (8 bytes),
and the body. The launcher's side begins each connection with an ATTACH, which the agent answers
with an ATTACHED; then come one START that way, output and at the end one EXIT or REFUSED the other
way, and ACKs both ways. Numbered frames that were not acknowledged are sent again on the next
connection (``stream``). No sockets here.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

START = 1
"""To the agent, numbered: the shell text that horovodrun made."""
STDOUT = 3
STDERR = 4
EXIT = 5
"""From the agent, numbered as output is: the command's status as in a shell, in decimal."""
REFUSED = 6
"""From the agent, numbered: the reason why the command was not started, one sentence."""
GONE = 7
"""From the agent or a sidecar on the way: the reason why it will not be known how the command
ends."""
ATTACH = 8
"""The first frame to the agent: JSON (``attaching``). Its number is that of the newest frame that
the sender has received."""
ATTACHED = 9
"""The agent's answer, empty. Its number is that of the newest frame that the agent has received."""
ACK = 10
"""Both ways, empty. Its number is that of the newest frame that the sender has received."""
ABANDON = 11
"""Instead of an ATTACH, from a sidecar: the launcher's side of a command is gone. JSON likewise."""
HOLD = 12
"""Instead of an ATTACH, from the sidecar beside the agent, empty: it cannot tell whether launchers
are there, so that no command is given up for silence."""

NUMBERED = frozenset((START, STDOUT, STDERR, EXIT, REFUSED))
OPENINGS = frozenset((ATTACH, ABANDON))

BODY_MAX = 512 * 1024
"""Maximum length of a body in bytes: a command with its environment fits in 128 KiB."""

_HEAD = Struct(">IBQ")
HEAD_SIZE = _HEAD.size
_KINDS = NUMBERED | OPENINGS | {GONE, ATTACHED, ACK, HOLD}


class ExecFrameError(ValueError):
    """Bytes that are no frame, or a body that does not suit its kind: one sentence why."""


class Frame(NamedTuple):
    """One frame."""

    kind: int
    body: bytes = b""
    number: int = 0


class Decoder:
    """A decoder that turns bytes into frames, however they were cut up on the way."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are complete with ``data``; raises ``ExecFrameError``."""
        data = self._rest + data if self._rest else data
        frames = []
        at = 0
        while len(data) - at >= HEAD_SIZE:
            kind, length, number = read_head(data, at)
            end = at + HEAD_SIZE + length
            if len(data) < end:
                break
            frames.append(Frame(kind, data[at + HEAD_SIZE : end], number))
            at = end
        self._rest = data[at:]
        return frames


def read_head(data: bytes, at: int = 0) -> tuple[int, int, int]:
    """Read a frame's kind, body length and number; raises ``ExecFrameError``."""
    length, kind, number = _HEAD.unpack_from(data, at)
    if kind not in _KINDS:
        raise ExecFrameError("there is no frame of kind %d" % kind)
    if length > BODY_MAX:
        raise ExecFrameError("a frame of %d bytes is too long" % length)
    return kind, length, number


def encode(kind: int, body: bytes = b"", number: int = 0) -> bytes:
    """Encode a frame; raises ``ExecFrameError`` if the body is too long."""
    if len(body) > BODY_MAX:
        raise ExecFrameError("a body of %d bytes is longer than %d" % (len(body), BODY_MAX))
    return _HEAD.pack(len(body), kind, number) + body


def read_status(body: bytes) -> int:
    """Parse the body of an EXIT, 0 to 255; raises ``ExecFrameError``."""
    if not body.isdigit() or not 0 <= int(body[:4]) <= 255 or len(body) > 3:
        raise ExecFrameError("an exit whose status is not a number from 0 to 255")
    return int(body)
