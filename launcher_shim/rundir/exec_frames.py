# SPDX-License-Identifier: Apache-2.0
"""The frames between both ends of a remote command, and their stream over its connections: pure.

The first frame of a connection names its session and its host. A session is one command; its name
is known only to the processes that take part in it. ``attempt`` counts its connections: a later one
replaces an earlier one, and an earlier one that comes late, or again, is refused. Each side looks
for the other for a time that follows the lease of the sidecars.
"""

from __future__ import annotations

import math
import os
from collections import deque
from struct import Struct
from typing import Deque, List, NamedTuple, Optional, Tuple

from launcher_shim.rundir import layout

START = 1
"""To the agent, numbered: the shell text that the launcher made."""
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


SESSION_LENGTH = 32
_HEXADECIMAL = frozenset("0123456789abcdef")


class Attaching(NamedTuple):
    """The content of an ATTACH or ABANDON.

    ``acknowledged`` is the number of the newest of the launcher's frames that the agent has
    acknowledged, ``received`` that of the newest of the agent's frames that the launcher's side has
    received.
    """

    host: str
    session: str
    attempt: int = 0
    acknowledged: int = 0
    received: int = 0


def encode_attaching(attaching: Attaching, kind: int = ATTACH) -> bytes:
    """Encode the first frame; host and session must be plain names."""
    body = '{"host": "%s", "session": "%s", "attempt": %d, "acknowledged": %d}' % attaching[:4]
    return encode(kind, body.encode(), attaching.received)


def read_attaching(frame: Frame) -> Attaching:
    """Decode the first frame; raises ``ExecFrameError``.

    A session is one command; it outlives its connections. Its name is known only to the
    processes that take part in it.
    """
    import json  # not at the top: the launcher's side has to start fast

    if frame.kind not in OPENINGS:
        raise ExecFrameError("the first frame is of kind %d, and attaches to nothing" % frame.kind)
    try:
        fields = json.loads(frame.body)
        attaching = Attaching(
            fields["host"],
            fields["session"],
            fields["attempt"],
            fields["acknowledged"],
            frame.number,
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ExecFrameError("the first frame does not say which command it is of") from error
    texts, numbers = attaching[:2], attaching[2:]
    if not all(isinstance(text, str) for text in texts) or not all(
        type(number) is int and 0 <= number < 1 << 63 for number in numbers
    ):
        raise ExecFrameError("the first frame does not say which command it is of")
    if len(attaching.session) != SESSION_LENGTH or not _HEXADECIMAL.issuperset(attaching.session):
        raise ExecFrameError("the first frame names no session")
    return attaching


WINDOW = 2 * 1024 * 1024
"""Maximum bytes that are kept for an end that has not acknowledged them; then the sender waits."""


class Stream:
    """One end. ``sent``, ``acknowledged``, ``received`` are numbers of frames; 0: none as yet.

    Each end numbers its frames, keeps each until the other end has acknowledged it, and sends
    it again on the next connection. A frame that comes twice is skipped, so that each counts
    once, in order, wherever a connection was cut.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.acknowledged = 0
        self.received = 0
        self.kept_bytes = 0
        self._kept: Deque[Tuple[int, bytes]] = deque()

    @property
    def has_room(self) -> bool:
        """Whether more may be sent before an acknowledgement comes."""
        return self.kept_bytes < WINDOW

    @property
    def all_acknowledged(self) -> bool:
        """Whether the other end has acknowledged every frame."""
        return self.acknowledged == self.sent

    def send(self, kind: int, body: bytes) -> bytes:
        """Keep a frame under the next number; return its bytes, for a connection if any."""
        data = encode(kind, body, self.sent + 1)
        self.sent += 1
        self._kept.append((self.sent, data))
        self.kept_bytes += len(data)
        return data

    def receive(self, frame: Frame) -> Optional[Frame]:
        """Return the frame if it counts: it is numbered and the next one.

        Raises ``ExecFrameError`` if it cannot follow the frames before.
        """
        if frame.kind == ACK:
            self.acknowledge(frame.number)
            return None
        if frame.kind not in NUMBERED:
            raise ExecFrameError("a frame of kind %d has no place in a stream" % frame.kind)
        if frame.number > self.received + 1 or not frame.number:
            raise ExecFrameError(
                "frame %d came where %d was to come" % (frame.number, self.received + 1)
            )
        if frame.number <= self.received:
            return None
        self.received = frame.number
        return frame

    def acknowledge(self, number: int) -> None:
        """Drop the frames up to ``number``: the other end has them.

        Raises ``ExecFrameError`` if that one was never sent.
        """
        if number > self.sent:
            raise ExecFrameError("frame %d was acknowledged, and never sent" % number)
        self.acknowledged = max(self.acknowledged, number)
        while self._kept and self._kept[0][0] <= number:
            self.kept_bytes -= len(self._kept.popleft()[1])

    def resume(self, number: int) -> List[bytes]:
        """Resume with an end that has all frames up to ``number``; return those that it lacks.

        Raises ``ExecFrameError`` if they were never sent, or it has acknowledged more before.
        """
        if number < self.acknowledged:
            raise ExecFrameError("frame %d was had before, and is not now" % self.acknowledged)
        self.acknowledge(number)
        return [data for _, data in self._kept]

    def acknowledgement(self) -> bytes:
        """Encode an ACK of all frames received."""
        return encode(ACK, b"", self.received)


LEASE_TTL_S = 10
"""The sidecar's lease in seconds, if it is not delivered."""
MARGIN_S = 5
"""Addition to the lease, in seconds: for another sidecar to start, and to be found. A worker whose
launcher is gone with its sidecar has been killed by then: see ``agent/tunnel/connections.py``."""
ABANDONED_GRACE_S = 1.5
"""Seconds between SIGTERM and SIGKILL of a command whose launcher's side is gone. A longer time
helps a worker that tidies up, and is taken from the margin."""

_NAME = "MUSTER_LEASE_TTL"


def read_lease_ttl_s(told: str) -> int:
    """Parse the lease that the sidecar delivers, in whole seconds; default: ``LEASE_TTL_S``."""
    plain = told.isascii() and told.isdigit() and len(told) < 7
    return int(told) if plain else LEASE_TTL_S


def delivered_lease_ttl_s(run_dir: str) -> int:
    """Read the lease of the sidecar that delivers to ``run_dir``, in seconds.

    A sidecar that was killed counts as there for its lease, and may be replaced within that
    time.
    """
    try:
        with open(os.path.join(run_dir, layout.ENVIRONMENT)) as file:
            lines = dict(line.rstrip("\n").partition("=")[::2] for line in file)
    except (OSError, ValueError):
        return LEASE_TTL_S
    return read_lease_ttl_s(lines.get(_NAME, ""))


def patience_s(lease_ttl_s: int) -> int:
    """Return for how many seconds the launcher's side tries to reach a command."""
    return lease_ttl_s + MARGIN_S


def detached_max_s(lease_ttl_s: int) -> int:
    """Return for how many seconds a command without its launcher's side runs before SIGTERM.

    In whole seconds, and so that it has been killed by the time that side gives up.
    """
    return patience_s(lease_ttl_s) - math.ceil(ABANDONED_GRACE_S)
