# SPDX-License-Identifier: Apache-2.0
"""One connection of gRPC as its server: HTTP/2 in plain text, for the embedded store alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from string import printable
from typing import Protocol, cast
from urllib.parse import quote

from rdzv.store.etcd.answers import StatusCode
from rdzv.store.http2.calls import MalformedError, MessageReader, framed
from rdzv.store.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    MAX_FRAME_BYTES,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    BlockReader,
    ConnectionFaultError,
    ErrorCode,
    FrameReader,
    HeaderDecoder,
    IncomingFrame,
    PeerSetting,
    check_opened,
    checked_window,
    frame,
    literal,
    settings_frame,
    settings_in,
    widened,
)

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 2 * 1024 * 1024
"""Bound on one message that comes in: etcd's own is 1.5 MiB."""

WINDOW = 1 << 22
"""Bytes that the client may send before they are given back."""

UNSENT_BYTES = 1 << 16
"""Bytes of one call that may wait for the client before its service does."""

UNREAD_BYTES = 1 << 26
"""Bound on what waits for the client, in its windows and for its socket, before one answer more: a
store may hold more than this, and one answer be all of it."""

MOST_CALLS = 1000
"""Bound on the open calls of one connection. The store's own client waits until one has ended."""

_HEAD = literal(b":status", b"200") + literal(b"content-type", b"application/grpc")
_PLAIN = printable[:-5].replace("%", "")
"""The characters that stay as they are in a status message."""


class Service(Protocol):
    """The one that serves a call, over a ``ServedCall``."""

    def take(self, message: bytes) -> None:
        """Take a request."""
        ...

    def end(self) -> None:
        """Note that the client makes no more requests."""
        ...

    def close(self) -> None:
        """Note that the call is over."""
        ...


class ServedCall:
    """One call of a client."""

    def __init__(self, connection: ServedConnection, stream_id: int, room: int) -> None:
        self.stream_id = stream_id
        self.room = room
        self.owed = 0
        self.reader = MessageReader(MAX_REQUEST_BYTES)
        self.service: Service | None = None
        self.head = frame(HEADERS, END_HEADERS, stream_id, _HEAD)
        self.pending = bytearray()
        self.trailers = b""
        self.client_ended = False
        self._connection = connection
        self._sent: asyncio.Event = asyncio.Event()

    def send(self, message: bytes) -> None:
        """Send an answer; nothing happens if the call is over."""
        self._connection.pump(self, framed(message))

    async def write(self, message: bytes) -> None:
        """Send an answer, and wait while the client reads too little."""
        self.send(message)
        while len(self.pending) > UNSENT_BYTES:
            self._sent.clear()
            await self._sent.wait()

    def finish(self, code: StatusCode, message: str = "") -> None:
        """End the call; nothing happens if it has ended."""
        if not self.trailers:
            text = quote(message.encode(errors="backslashreplace"), safe=_PLAIN)
            self.trailers = literal(b"grpc-status", b"%d" % code.value)
            self.trailers += literal(b"grpc-message", text.encode())
            self._connection.pump(self)

    def went_out(self) -> None:
        """Wake who waits for the client."""
        self._sent.set()


Services = Mapping[bytes, Callable[[ServedCall], Service]]
"""By the paths of their calls."""


class ServedConnection(asyncio.Protocol):
    """The protocol of a transport that a client has opened."""

    def __init__(self, services: Services, connections: set[ServedConnection]) -> None:
        self._services = services
        self._connections = connections
        self._reader = FrameReader()
        self._blocks = BlockReader()
        self._decoder = HeaderDecoder()
        self._calls: dict[int, ServedCall] = {}
        self._greeting = b""
        self._greeted = False
        self._last_id = 0
        self._room = self._initial_room = 65535
        self._max_frame = MAX_FRAME_BYTES
        self._owed = 0
        self._held = 0
        """The bytes of all calls that the windows hold back."""
        self._paused = False
        self._out = bytearray()
        self._feeding = False

    # -- for the server and the calls

    def end(self, code: ErrorCode = ErrorCode.NO_ERROR) -> None:
        """End the connection: the client learns which of its calls nobody has looked at."""
        last_id = self._last_id.to_bytes(4, "big")
        self._queue(frame(GOAWAY, 0, 0, last_id + code.to_bytes(4, "big")))
        self._flush()
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._transport.abort()

    def pump(self, call: ServedCall, more: bytes = b"") -> None:
        """Send of a call what socket and windows let through, and its end after all."""
        if call.stream_id not in self._calls or (more and not self._keeps_up(self._held)):
            return
        call.pending += more
        self._held += len(more)
        if call.pending and call.head:
            self._queue(call.head)
            call.head = b""
        while call.pending and not self._paused:
            room = min(self._room, call.room, self._max_frame)
            if room <= 0:
                break
            part = bytes(call.pending[:room])
            del call.pending[:room]
            self._held -= len(part)
            self._room -= len(part)
            call.room -= len(part)
            self._queue(frame(DATA, 0, call.stream_id, part))
        if call.trailers and not call.pending:
            block = (_HEAD if call.head else b"") + call.trailers
            self._queue(frame(HEADERS, END_HEADERS | END_STREAM, call.stream_id, block))
            if not call.client_ended:
                self._reset(call.stream_id, ErrorCode.NO_ERROR)
            self._close(call)
        if len(call.pending) <= UNSENT_BYTES:
            call.went_out()

    # -- for the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._queue(
            settings_frame(
                (PeerSetting.MAX_STREAMS, MOST_CALLS), (PeerSetting.INITIAL_WINDOW, WINDOW)
            )
        )
        self._queue(frame(WINDOW_UPDATE, 0, 0, (WINDOW - 65535).to_bytes(4, "big")))

    def data_received(self, data: bytes) -> None:
        """Serve what came in, and answer it in one piece."""
        if self._transport.is_closing():
            return
        if not self._greeted:
            self._greeting += data
            if not self._greeting.startswith(PREFACE[: len(self._greeting)]):
                self._transport.abort()
                return
            if len(self._greeting) < len(PREFACE):
                return
            self._greeted, data = True, self._greeting[len(PREFACE) :]
        self._feeding = True
        try:
            for one in self._reader.read(data):
                if self._transport.is_closing():
                    return
                self._take_frame(one)
        except ConnectionFaultError as fault:
            self.end(fault.code)
        finally:
            self._feeding = False
        self._flush()

    def pause_writing(self) -> None:
        """Keep the answers, as the client takes no more for now."""
        self._paused = True

    def resume_writing(self) -> None:
        """Send what was kept."""
        self._paused = False
        self._pump_all()

    def connection_lost(self, error: Exception | None) -> None:
        """End every call."""
        self._connections.discard(self)
        for call in tuple(self._calls.values()):
            self._close(call)

    # -- in

    def _take_frame(self, one: IncomingFrame) -> None:
        kind = one.kind
        if kind in (HEADERS, CONTINUATION) or self._blocks.partial:
            whole = self._blocks.take(one)
            if whole is not None:
                self._take_block(*whole)
        elif kind == DATA:
            self._take_data(one)
        elif kind == WINDOW_UPDATE:
            self._take_window(one)
        elif kind == PING and not one.flags & ACK:
            self._queue(frame(PING, ACK, 0, one.payload))
        elif kind == SETTINGS and not one.flags & ACK:
            self._take_settings(one.payload)
        elif kind == RST_STREAM:
            call = self._known(one)
            if call is not None:
                self._close(call)

    def _take_block(self, begun: IncomingFrame, block: bytes) -> None:
        # Those of calls that are refused or over, too: they may change the table.
        fields = dict(self._decoder.decode(block))
        opens = begun.stream_id > self._last_id
        self._last_id = max(begun.stream_id, self._last_id)
        call = self._known(begun)
        if opens and len(self._calls) >= MOST_CALLS:
            self._reset(begun.stream_id, ErrorCode.REFUSED_STREAM)
        elif opens:
            call = self._begin(begun.stream_id, fields.get(b":path", b""))
        if call is not None and begun.flags & END_STREAM:
            self._end(call)

    def _known(self, one: IncomingFrame) -> ServedCall | None:
        """Return the call of a frame, or None if it is over."""
        check_opened(one.stream_id, self._last_id)
        return self._calls.get(one.stream_id)

    def _begin(self, stream_id: int, path: bytes) -> ServedCall:
        self._calls[stream_id] = call = ServedCall(self, stream_id, self._initial_room)
        make = self._services.get(path)
        if make is None:
            name = path.decode(errors="backslashreplace")
            call.finish(StatusCode.UNIMPLEMENTED, f"the embedded store has no {name}")
        else:
            call.service = make(call)
        return call

    def _take_data(self, one: IncomingFrame) -> None:
        self._owed += one.counted
        if self._owed >= WINDOW // 4:
            self._queue(frame(WINDOW_UPDATE, 0, 0, self._owed.to_bytes(4, "big")))
            self._owed = 0
        call = self._known(one)
        if call is None:
            return
        if call.client_ended:
            self._break(call, ErrorCode.STREAM_CLOSED)
            return
        if one.flags & END_STREAM:
            call.client_ended = True
        if call.service is not None and not call.trailers:
            self._serve(call, call.service, one.payload)
        if one.flags & END_STREAM:
            self._end(call)
            return
        call.owed += one.counted
        if call.owed >= WINDOW // 4:
            self._queue(frame(WINDOW_UPDATE, 0, one.stream_id, call.owed.to_bytes(4, "big")))
            call.owed = 0

    def _serve(self, call: ServedCall, service: Service, data: bytes) -> None:
        try:
            for message in call.reader.read(data):
                if call.trailers or call.stream_id not in self._calls:
                    return
                service.take(message)
        except MalformedError as error:
            call.finish(StatusCode.INVALID_ARGUMENT, str(error))
        except Exception as error:
            log.exception("a call failed in the embedded store")
            call.finish(StatusCode.UNKNOWN, repr(error))

    def _end(self, call: ServedCall) -> None:
        """Note that the client makes no more requests."""
        call.client_ended = True
        if call.service is not None and not call.trailers:
            call.service.end()

    def _take_window(self, one: IncomingFrame) -> None:
        if not one.stream_id:
            self._room = widened(self._room, one.payload)
            self._pump_all()
            return
        call = self._known(one)
        if call is None:
            return
        try:
            call.room = widened(call.room, one.payload)
        except ConnectionFaultError as fault:
            self._break(call, fault.code)
            return
        self.pump(call)

    def _take_settings(self, payload: bytes) -> None:
        for key, value in settings_in(payload):
            if key == PeerSetting.MAX_FRAME:
                self._max_frame = value
            elif key == PeerSetting.INITIAL_WINDOW:
                for call in self._calls.values():
                    call.room = checked_window(call.room + value - self._initial_room)
                self._initial_room = value
        self._queue(frame(SETTINGS, ACK, 0, b""))
        self._pump_all()

    # -- out

    def _pump_all(self) -> None:
        for call in tuple(self._calls.values()):
            self.pump(call)

    def _break(self, call: ServedCall, code: ErrorCode) -> None:
        """End a call whose client broke the protocol on its stream."""
        self._reset(call.stream_id, code)
        self._close(call)

    def _reset(self, stream_id: int, code: ErrorCode) -> None:
        self._queue(frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big")))

    def _queue(self, chunk: bytes) -> None:
        self._out += chunk
        if not self._feeding or len(self._out) > UNSENT_BYTES:
            self._flush()

    def _flush(self) -> None:
        out, self._out = self._out, bytearray()
        if out and not self._transport.is_closing() and self._keeps_up(0):
            self._transport.write(out)

    def _keeps_up(self, held: int) -> bool:
        """Return whether the client is still there; leave it if it reads too little."""
        if held + self._transport.get_write_buffer_size() > UNREAD_BYTES:
            log.warning("a client of the embedded store read too little of what it asked for")
            self._transport.abort()
            self.connection_lost(None)
        return not self._transport.is_closing()

    def _close(self, call: ServedCall) -> None:
        """Forget a call; its client hears no more of it."""
        if self._calls.pop(call.stream_id, None) is None:
            return
        self._held -= len(call.pending)
        call.pending.clear()
        call.went_out()
        if call.service is not None:
            call.service.close()
