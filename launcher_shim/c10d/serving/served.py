# SPDX-License-Identifier: Apache-2.0
"""The session that serves one client's connection, from the handshake on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from launcher_shim.c10d.serving.relayed import RelayNumbers
from launcher_shim.tcpstore import wire


class Session(Protocol):
    """The session of one client connection."""

    @property
    def whole(self) -> Mapping[bytes, bytes]:
        """Answers by the bytes of one request, or of several that came together.

        They are sent at once, without a call of ``handle``.
        """
        ...

    def keep(self, data: bytes, requests: Sequence[wire.Request]) -> None:
        """Note that ``requests``, whose bytes are ``data``, were all answered at once.

        Called within the same turn of the loop.
        """
        ...

    def handle(self, request: wire.Request) -> bytes | Awaitable[bytes]:
        """Return the answer, at once or later; ``b""`` for requests that have none.

        Never called for Validate, Ping and CancelWait, nor while an earlier request of the same
        connection is under way, except a Wait or Barrier. A request under way is cancelled if the
        client gives its Wait or Barrier up, or is gone. An exception closes the connection: a
        MusterError or FrameError is logged as its sentence, anything else with a traceback.
        """
        ...

    def closed(self) -> None:
        """End the session: the client is gone, its last writes stored or given up. Called once."""
        ...


OpenSession = Callable[[str, RelayNumbers | None], Session]
"""Creates the session of a client from a description of the peer, and its relay or None."""
