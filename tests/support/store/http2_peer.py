# SPDX-License-Identifier: Apache-2.0
"""What a server of HTTP/2 may say, right or wrong, and what a client made of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from rdzv.store.http2.calls import framed
from rdzv.store.http2.connection import Http2Connection
from rdzv.store.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Engine,
    Fields,
    FrameReader,
    HeaderDecoder,
    IncomingFrame,
    frame,
    literal,
)

GREETING = frame(SETTINGS, 0, 0, b"")
OK_FIELDS = ((b":status", b"200"), (b"content-type", b"application/grpc"))
OK_TRAILERS = ((b"grpc-status", b"0"),)


class Seen(NamedTuple):
    """One call of a listener."""

    what: str
    stream_id: int = 0
    more: Any = None


class Listening:
    """A ``EngineListener`` that writes down what it hears; data is put together."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def settled(self) -> None:
        self.seen.append(Seen("settled"))

    def headers(self, stream_id: int, fields: Fields, ended: bool) -> None:
        self.seen.append(Seen("headers", stream_id, (tuple(fields), ended)))

    def data(self, stream_id: int, data: bytes, counted: int, ended: bool) -> None:
        self.seen.append(Seen("data", stream_id, (data, counted, ended)))

    def broken(self, stream_id: int, code: int) -> None:
        self.seen.append(Seen("broken", stream_id, code))

    def refused(self, stream_id: int) -> None:
        self.seen.append(Seen("refused", stream_id))


def block(fields: Fields = OK_FIELDS) -> bytes:
    return b"".join(literal(*field) for field in fields)


def headers(stream_id: int, fields: Fields = OK_FIELDS, *, ended: bool = False) -> bytes:
    flags = END_HEADERS | (END_STREAM if ended else 0)
    return frame(HEADERS, flags, stream_id, block(fields))


def data(stream_id: int, payload: bytes, *, ended: bool = False) -> bytes:
    return frame(DATA, END_STREAM if ended else 0, stream_id, payload)


def trailers(stream_id: int, fields: Fields = OK_TRAILERS) -> bytes:
    return headers(stream_id, fields, ended=True)


def reset(stream_id: int, code: int) -> bytes:
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def goaway(last_id: int, code: int = 0) -> bytes:
    return frame(GOAWAY, 0, 0, last_id.to_bytes(4, "big") + code.to_bytes(4, "big"))


def window(stream_id: int, more: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, more.to_bytes(4, "big"))


def settings(*pairs: tuple[int, int]) -> bytes:
    payload = b"".join(k.to_bytes(2, "big") + v.to_bytes(4, "big") for k, v in pairs)
    return frame(SETTINGS, 0, 0, payload)


def sent(engine: Engine) -> list[IncomingFrame]:
    """The frames that the client sends now, without those that open a connection."""
    out = engine.take()
    if out.startswith(PREFACE):
        return FrameReader().read(out.removeprefix(PREFACE))[2:]
    reader = FrameReader()
    reader.read(GREETING)
    return reader.read(out)


class Wire(asyncio.Transport):
    """The other end of a connection, which takes all that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.closing = self.aborted = False
        self.writes = self.unread = 0
        """How often it was written to, and the bytes that lie in front of the socket."""
        self.on_write: Callable[[], None] = lambda: None
        self.decoder = HeaderDecoder()
        self.frames: list[IncomingFrame] = []
        self._reader = FrameReader()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closing
        self.writes += 1
        self.on_write()
        self.frames += self._reader.read(bytes(data).removeprefix(PREFACE))

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True

    def of(self, kind: int) -> list[IncomingFrame]:
        return [one for one in self.frames if one.kind == kind]

    def fields(self, number: int = -1) -> dict[bytes, bytes]:
        """The fields of one block of headers."""
        return dict(self.decoder.decode(self.of(HEADERS)[number].payload))

    def given_back(self, *streams: int) -> int:
        """So many bytes more may come on the connection and its streams, or on these."""
        found = self.of(WINDOW_UPDATE)
        return sum(
            int.from_bytes(one.payload, "big")
            for one in found
            if not streams or one.stream_id in streams
        )


class Played(Http2Connection):
    """A connection that is up, and its other end."""

    def __init__(self, *limits: tuple[int, int]) -> None:
        super().__init__("http", "store:2379")
        self.wire = Wire()
        self.connection_made(self.wire)
        self.data_received(settings(*limits))
        self.wire.frames.clear()

    def hear(self, *frames: bytes) -> None:
        self.data_received(b"".join(frames))

    def answer(self, stream_id: int, message: bytes = b"answer") -> None:
        self.hear(headers(stream_id), data(stream_id, framed(message)), trailers(stream_id))

    def jam(self) -> None:
        self.wire.unread = 1
        self.pause_writing()
