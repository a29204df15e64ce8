# SPDX-License-Identifier: Apache-2.0
"""One end of a stream of numbered frames that outlives its connections: pure.

Each end numbers its frames, keeps each until the other end has acknowledged it, and sends it again
on the next connection. A frame that comes twice is skipped, so that each counts once, in order,
wherever a connection was cut.
"""

from __future__ import annotations

from collections import deque
from typing import Deque, List, Optional, Tuple

from launcher_shim.horovod.exec.frames import ACK, NUMBERED, ExecFrameError, Frame, encode

WINDOW = 2 * 1024 * 1024
"""Maximum bytes that are kept for an end that has not acknowledged them; then the sender waits."""


class Stream:
    """One end. ``sent``, ``acknowledged``, ``received`` are numbers of frames; 0: none as yet."""

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
