# SPDX-License-Identifier: Apache-2.0
"""What a client's connection is served by: one session, opened when the client has said hello."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from launcher_shim.c10d.serving.relayed import RelayNumbers
from launcher_shim.tcpstore import wire


class Session(Protocol):
    """What one client connection is served by."""

    @property
    def whole(self) -> Mapping[bytes, bytes]:
        """Answers that may be given at once, without ``handle``, to exactly these bytes.

        They are one request, or several that came together.
        """
        ...

    def keep(self, data: bytes, requests: Sequence[wire.Request]) -> None:
        """Take note that ``requests``, whose bytes are ``data``, were all answered at once.

        Called within the turn of the loop in which they were.
        """
        ...

    def handle(self, request: wire.Request) -> bytes | Awaitable[bytes]:
        """Return the answer, at once or later; ``b""`` for requests that have none.

        Never called for Validate, Ping and CancelWait, nor while an earlier request of the same
        connection is under way, save a Wait or Barrier. What is under way is cancelled when the
        client gives its Wait or Barrier up, or when nobody is left to read the answer. To raise
        is to close the connection: a MusterError or FrameError with that sentence in the log,
        anything else with a traceback.
        """
        ...

    def closed(self) -> None:
        """The client is gone, and what it set last is stored, or given up. Called once."""
        ...


OpenSession = Callable[[str, RelayNumbers | None], Session]
"""Makes the session of a client: of a description of the peer, and the relay if it is one."""
