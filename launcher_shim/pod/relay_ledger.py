# SPDX-License-Identifier: Apache-2.0
"""The requests of one client that no sidecar has answered yet; no I/O.

Each request gets a number, unique for as long as the client is connected. The next sidecar is sent
all unanswered requests again, with the same numbers, so that each is applied once.
"""

from __future__ import annotations

from typing import Dict, NamedTuple

import launcher_shim.tcpstore.wire as wire


class _Unsettled(NamedTuple):
    request: wire.Request
    frame: bytes


class RelayLedger:
    """The requests of one client; ``session`` names its connection."""

    def __init__(self, session: bytes) -> None:
        self.held = 0
        """Bytes of the requests that are not settled."""
        self.note = b""
        """The note that the sidecar keeps here."""
        self._session = session
        self._unsettled: Dict[int, _Unsettled] = {}
        self._following = 1
        self._sent = 0

    def __len__(self) -> int:
        return len(self._unsettled)

    @property
    def was_sent(self) -> bool:
        """Whether any sidecar may have got a request of this client."""
        return self._sent > 0

    @property
    def busy(self) -> bool:
        """Whether a request is unanswered that does not wait for other clients."""
        unsettled = self._unsettled.values()
        return any(not isinstance(entry.request, wire.PATIENT) for entry in unsettled)

    @property
    def owes(self) -> bool:
        """Whether a write is unanswered: it counts even if its client is gone."""
        return any(isinstance(entry.request, wire.SILENT) for entry in self._unsettled.values())

    @property
    def awaited(self) -> bool:
        """Whether its client waits for an answer."""
        unsettled = self._unsettled.values()
        return any(not isinstance(entry.request, wire.SILENT) for entry in unsettled)

    def add(self, request: wire.Request, *, connected: bool) -> bytes:
        """Add a request under the next number; return its bytes, for a sidecar if there is one."""
        frame = wire.encode(request)
        number = self._following
        self._following += 1
        self._unsettled[number] = _Unsettled(request, frame)
        self.held += len(frame)
        if connected:
            self._sent = number
        return frame

    def begin(self) -> bytes:
        """Return the first bytes for a sidecar: the preface, and all unanswered requests."""
        again = tuple(number for number in self._unsettled if number <= self._sent)
        preface = wire.Preface(self._session, self._sent + 1, again, self.note)
        self._sent = self._following - 1
        frames = [entry.frame for entry in self._unsettled.values()]
        return b"".join([preface.encode(), wire.HANDSHAKE, *frames])

    def settle(self, number: int, answer: bytes) -> bytes:
        """Record an answer; return the bytes for the client."""
        entry = self._unsettled.get(number)
        if entry is None:
            return b""  # a wait that was given up
        self._drop(number)
        if isinstance(entry.request, wire.CancelWait):
            for earlier, other in tuple(self._unsettled.items()):
                if earlier < number and isinstance(other.request, wire.PATIENT):
                    self._drop(earlier)
        return answer

    def _drop(self, number: int) -> None:
        self.held -= len(self._unsettled.pop(number).frame)
