# SPDX-License-Identifier: Apache-2.0
"""The seam between HTTP/2 and a connection: tests fill it with a second engine, to compare."""

from __future__ import annotations

from typing import Protocol

from rdzv.store.http2.header_blocks import Fields


class EngineListener(Protocol):
    """The connection behind an engine; called while bytes are fed."""

    def settled(self) -> None:
        """Note the peer's settings: it has accepted this connection."""
        ...

    def headers(self, stream_id: int, fields: Fields, ended: bool) -> None:
        """Take headers or trailers."""
        ...

    def data(self, stream_id: int, data: bytes, counted: int, ended: bool) -> None:
        """Take a piece of the answer; ``counted`` bytes are to be given back (``release``)."""
        ...

    def broken(self, stream_id: int, code: int) -> None:
        """Note that a stream was reset; what became of the request is unknown."""
        ...

    def refused(self, stream_id: int) -> None:
        """Note that a request was certainly not carried out."""
        ...


class Engine(Protocol):
    """HTTP/2 as a connection needs it."""

    @property
    def draining(self) -> bool:
        """Whether the peer, or the end of the ids, allows no more streams."""
        ...

    @property
    def full(self) -> bool:
        """Whether the peer allows no more streams for now."""
        ...

    def begin(self, block: bytes, data: bytes, *, ended: bool) -> int:
        """Open a stream with a block of headers and some data; return its id."""
        ...

    def send(self, stream_id: int, data: bytes) -> None:
        """Send more data on a stream that goes on."""
        ...

    def cancel(self, stream_id: int) -> bool:
        """End a stream; return whether the peer certainly never had its whole request."""
        ...

    def unsent(self, stream_id: int) -> bool:
        """Return whether a part of what a stream sends has not been taken yet."""
        ...

    def release(self, stream_id: int, counted: int) -> None:
        """Let the peer send so many bytes more on a stream."""
        ...

    def ping(self) -> None:
        """Ask for a sign of life."""
        ...

    def feed(self, data: bytes) -> None:
        """Take what came from the socket; raise ``ConnectionFaultError``."""
        ...

    def take(self) -> bytes:
        """Return what is to go to the socket now, which counts as sent."""
        ...
