# SPDX-License-Identifier: Apache-2.0
"""One end of a stream of numbered frames that outlives its connections: pure.

Each end numbers what it sends, keeps it until the other end has acknowledged it, and sends it again
on the next connection. What comes twice is passed over, so that each frame counts once, in order,
wherever a connection was cut.
"""

from __future__ import annotations

from collections import deque
from typing import Deque, List, Optional, Tuple

from launcher_shim.horovod.exec.frames import ACK, NUMBERED, ExecFrameError, Frame, encode

WINDOW = 2 * 1024 * 1024
"""Bytes that may be kept for an end that has not acknowledged them; then the sender waits."""


class Stream:
    """``sent``, ``acknowledged`` and ``received`` are numbers of frames; 0: none as yet."""

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
        """Whether the other end has had everything."""
        return self.acknowledged == self.sent

    def send(self, kind: int, body: bytes) -> bytes:
        """Number a frame and keep it; returns it as bytes, for a connection if there is one."""
        data = encode(kind, body, self.sent + 1)
        self.sent += 1
        self._kept.append((self.sent, data))
        self.kept_bytes += len(data)
        return data

    def receive(self, frame: Frame) -> Optional[Frame]:
        """Return the frame if it counts: it is numbered and the next one.

        Raises ``ExecFrameError`` for one that cannot follow what came before.
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
        """The other end has had all up to ``number``; raises ``ExecFrameError`` if none was."""
        if number > self.sent:
            raise ExecFrameError("frame %d was acknowledged, and never sent" % number)
        self.acknowledged = max(self.acknowledged, number)
        while self._kept and self._kept[0][0] <= number:
            self.kept_bytes -= len(self._kept.popleft()[1])

    def resume(self, number: int) -> List[bytes]:
        """Begin anew with an end that has had all up to ``number``; returns what it has not had.

        Raises ``ExecFrameError`` if it cannot have had it, or has said before that it had more.
        """
        if number < self.acknowledged:
            raise ExecFrameError("frame %d was had before, and is not now" % self.acknowledged)
        self.acknowledge(number)
        return [data for _, data in self._kept]

    def acknowledgement(self) -> bytes:
        """An ACK of all that was received."""
        return encode(ACK, b"", self.received)
