# SPDX-License-Identifier: Apache-2.0
"""The relay of ``muster-run`` that a connection comes through, as its session sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from launcher_shim.tcpstore import wire


class RelayNumbers:
    """The request numbers of a client behind a relay; also stores its session's note there.

    ``number`` is that of the request being handled; ``again``: whether this sidecar or an earlier
    one may have carried it out already.
    """

    def __init__(self, preface: wire.Preface, keep: Callable[[bytes], None]) -> None:
        self.session = preface.session
        self.note = preface.note
        self.number = 0
        self.again = False
        self._repeated = deque(preface.again)
        self.following = preface.following
        self._keep = keep

    def next(self) -> int:
        """Assign and return the number of the next request."""
        self.again = bool(self._repeated)
        if self.again:
            self.number = self._repeated.popleft()
        else:
            self.number = self.following
            self.following += 1
        return self.number

    def keep(self, note: bytes) -> None:
        """Have the relay keep ``note`` for the next sidecar that it connects to.

        A note that is too long is not kept: the store has most of it.
        """
        if note != self.note and len(note) <= wire.NOTE_MAX:
            self.note = note
            self._keep(note)
