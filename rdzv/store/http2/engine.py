# SPDX-License-Identifier: Apache-2.0
"""One connection of HTTP/2 as its client: bytes in, bytes out, and what happened. No I/O, no time.

It knows which part of a request has been taken for the socket: a request whose last byte has not
been taken can be withdrawn, and was certainly not carried out.
"""

from __future__ import annotations

from rdzv.store.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    MAX_FRAME_BYTES,
    MAX_LIST_BYTES,
    NO_TABLE,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    BlockReader,
    ConnectionFaultError,
    EngineListener,
    ErrorCode,
    Fields,
    FrameReader,
    HeaderDecoder,
    IncomingFrame,
    PeerSetting,
    check_opened,
    checked_window,
    frame,
    pack_head,
    settings_frame,
    settings_in,
    widened,
)

STREAM_WINDOW = 1 << 20
"""Bytes that the peer may send on one stream before they have been read. Larger: fewer round trips
in a large answer; smaller: less memory for a watch without a reader."""

CONNECTION_WINDOW = 1 << 24
"""The same for all streams together, given back as soon as bytes have come."""

LAST_STREAM_ID = (1 << 31) - 1
MOST_UNTAKEN_ANSWERS = 1000
"""Bound on what the peer makes this side answer while it reads nothing."""


class _ClientStream:
    __slots__ = ("answered", "ended", "first", "id", "last", "owed", "pending", "room", "unread")

    def __init__(self, stream_id: int, room: int, ended: bool) -> None:
        self.id = stream_id
        self.room = room
        self.unread = STREAM_WINDOW
        """The bytes that the peer may still send."""
        self.owed = 0
        self.pending = b""
        """The bytes that the windows hold back."""
        self.ended = ended
        """Whether no more data comes from here once ``pending`` has gone."""
        self.answered = False
        self.first = self.last = 0
        """The positions of its first and last chunk among all that were ever queued."""


class Http2Engine:
    """The ``Engine`` of the store driver."""

    def __init__(self, listener: EngineListener) -> None:
        self._listener = listener
        self._reader = FrameReader()
        self._blocks = BlockReader()
        self._decoder = HeaderDecoder()
        self._streams: dict[int, _ClientStream] = {}
        self._last_id = -1
        self.draining = False
        """Whether the peer, or the end of the ids, allows no more streams."""
        self._settled = False
        self._room = 65535
        self._initial_room = 65535
        self._max_frame = MAX_FRAME_BYTES
        self._max_streams = LAST_STREAM_ID
        self._blocked: dict[int, _ClientStream] = {}
        self._unread = CONNECTION_WINDOW
        self._owed = 0
        self._answers = 0
        self._taken = 0
        self._chunks = [
            PREFACE,
            settings_frame(
                (PeerSetting.HEADER_TABLE_SIZE, 4096),
                (PeerSetting.ENABLE_PUSH, 0),
                (PeerSetting.INITIAL_WINDOW, STREAM_WINDOW),
                (PeerSetting.MAX_HEADER_LIST, MAX_LIST_BYTES),
            ),
            frame(WINDOW_UPDATE, 0, 0, (CONNECTION_WINDOW - 65535).to_bytes(4, "big")),
        ]
        self._owners: list[tuple[_ClientStream | None, int]] = [(None, 0)] * len(self._chunks)

    @property
    def full(self) -> bool:
        """Whether the peer allows no more streams for now."""
        return len(self._streams) >= self._max_streams

    def begin(self, block: bytes, data: bytes, *, ended: bool) -> int:
        """Open a stream with a block of headers and some data; return its id."""
        block = NO_TABLE + block
        self._last_id += 2
        self.draining |= self._last_id + 2 > LAST_STREAM_ID
        stream = _ClientStream(self._last_id, self._initial_room, ended)
        self._streams[stream.id] = stream
        stream.first = self._taken + len(self._chunks)
        if len(block) <= self._max_frame and 0 < len(data) <= min(
            self._room, stream.room, self._max_frame
        ):
            # In one piece, as almost all requests are.
            self._room -= len(data)
            stream.room -= len(data)
            head = pack_head(len(block) >> 8, len(block) & 0xFF, HEADERS, END_HEADERS, stream.id)
            flags = END_STREAM if ended else 0
            middle = pack_head(len(data) >> 8, len(data) & 0xFF, DATA, flags, stream.id)
            self._queue(b"".join((head, block, middle, data)), stream, len(data))
            return stream.id
        kind, flags = HEADERS, 0 if data or not ended else END_STREAM
        while len(block) > self._max_frame:
            part, block = block[: self._max_frame], block[self._max_frame :]
            self._queue(frame(kind, flags, stream.id, part), stream, 0)
            kind, flags = CONTINUATION, 0
        self._queue(frame(kind, flags | END_HEADERS, stream.id, block), stream, 0)
        if data:
            stream.pending = data
            self._pump(stream)
        return stream.id

    def send(self, stream_id: int, data: bytes) -> None:
        """Send more data on a stream that goes on."""
        stream = self._streams[stream_id]
        stream.pending += data
        self._pump(stream)

    def cancel(self, stream_id: int) -> bool:
        """End a stream; return whether the peer certainly never had its whole request."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return False
        unsent = self._is_unsent(stream)
        self._drop(stream)
        if stream.first < self._taken:
            self._reset(stream_id, ErrorCode.CANCEL)
        return unsent

    def unsent(self, stream_id: int) -> bool:
        """Return whether a part of what a stream sends has not been taken yet."""
        stream = self._streams.get(stream_id)
        return stream is not None and self._is_unsent(stream)

    def release(self, stream_id: int, counted: int) -> None:
        """Let the peer send so many bytes more on a stream."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        stream.owed += counted
        if stream.owed >= STREAM_WINDOW // 4:
            stream.unread += stream.owed
            self._queue(frame(WINDOW_UPDATE, 0, stream_id, stream.owed.to_bytes(4, "big")))
            stream.owed = 0

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._queue(frame(PING, 0, 0, bytes(8)))

    def take(self) -> bytes:
        """Return what is to go to the socket now, which counts as sent."""
        chunks = self._chunks
        if not chunks:
            return b""
        self._taken += len(chunks)
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._owners.clear()
        self._answers = 0
        return data

    def feed(self, data: bytes) -> None:
        """Take what came from the socket; raise ``ConnectionFaultError``."""
        try:
            for one in self._reader.read(data):
                self._take_frame(one)
        except ConnectionFaultError as fault:
            self._queue(frame(GOAWAY, 0, 0, bytes(4) + fault.code.to_bytes(4, "big")))
            raise

    # -- out

    def _queue(self, chunk: bytes, stream: _ClientStream | None = None, size: int = 0) -> None:
        if stream is not None:
            stream.last = self._taken + len(self._chunks)
        self._chunks.append(chunk)
        self._owners.append((stream, size))

    def _answer(self, chunk: bytes) -> None:
        self._answers += 1
        if self._answers > MOST_UNTAKEN_ANSWERS:
            raise ConnectionFaultError(
                ErrorCode.ENHANCE_YOUR_CALM, "it asks much, and reads no answer"
            )
        self._queue(chunk)

    def _reset(self, stream_id: int, code: ErrorCode) -> None:
        self._answer(frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big")))

    def _is_unsent(self, stream: _ClientStream) -> bool:
        return bool(stream.pending) or stream.last >= self._taken

    def _pump(self, stream: _ClientStream) -> None:
        """Queue what the windows let through."""
        while stream.pending:
            room = min(self._room, stream.room, self._max_frame)
            if room <= 0:
                self._blocked[stream.id] = stream
                return
            part, stream.pending = stream.pending[:room], stream.pending[room:]
            self._room -= len(part)
            stream.room -= len(part)
            flags = END_STREAM if stream.ended and not stream.pending else 0
            self._queue(frame(DATA, flags, stream.id, part), stream, len(part))
        self._blocked.pop(stream.id, None)

    def _pump_all(self) -> None:
        for stream in tuple(self._blocked.values()):
            self._pump(stream)

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
        elif kind == PING:
            if not one.flags & ACK:
                self._answer(frame(PING, ACK, 0, one.payload))
        elif kind == SETTINGS:
            if not one.flags & ACK:
                self._take_settings(one.payload)
        elif kind == RST_STREAM:
            self._take_reset(one)
        elif kind == GOAWAY:
            self._take_goaway(one.payload)

    def _known(self, one: IncomingFrame) -> _ClientStream | None:
        """Return the stream of a frame, or None if it has ended."""
        stream = self._streams.get(one.stream_id)
        if stream is None:
            check_opened(one.stream_id, self._last_id)
        return stream

    def _take_data(self, one: IncomingFrame) -> None:
        stream = self._known(one)
        counted = one.counted
        self._unread -= counted
        if self._unread < 0:
            raise ConnectionFaultError(ErrorCode.FLOW_CONTROL_ERROR, "more data than allowed")
        self._owed += counted
        if self._owed >= CONNECTION_WINDOW // 4:
            self._unread += self._owed
            self._queue(frame(WINDOW_UPDATE, 0, 0, self._owed.to_bytes(4, "big")))
            self._owed = 0
        if stream is None:
            return
        stream.unread -= counted
        if stream.unread < 0:
            self._break(stream, ErrorCode.FLOW_CONTROL_ERROR)
        elif not stream.answered:
            self._break(stream, ErrorCode.PROTOCOL_ERROR)
        else:
            ended = bool(one.flags & END_STREAM)
            if ended:
                self._end(stream)
            self._listener.data(one.stream_id, one.payload, counted, ended)

    def _take_block(self, one: IncomingFrame, block: bytes) -> None:
        stream = self._known(one)
        # Those of streams that have ended, too: they may change the table.
        fields = self._decoder.decode(block)
        if stream is None:
            return
        ended = bool(one.flags & END_STREAM)
        if not stream.answered and not ended and _is_informational(fields):
            return
        if stream.answered and not ended:
            self._break(stream, ErrorCode.PROTOCOL_ERROR)
            return
        stream.answered = True
        if ended:
            self._end(stream)
        self._listener.headers(one.stream_id, fields, ended)

    def _take_window(self, one: IncomingFrame) -> None:
        if not one.stream_id:
            self._room = widened(self._room, one.payload)
            if self._blocked:
                self._pump_all()
            return
        stream = self._known(one)
        if stream is None:
            return
        try:
            stream.room = widened(stream.room, one.payload)
        except ConnectionFaultError as fault:
            self._break(stream, fault.code)
            return
        if stream.pending:
            self._pump(stream)

    def _take_settings(self, payload: bytes) -> None:
        for key, value in settings_in(payload):
            if key == PeerSetting.MAX_STREAMS:
                self._max_streams = value
            elif key == PeerSetting.INITIAL_WINDOW:
                for stream in self._streams.values():
                    stream.room = checked_window(stream.room + value - self._initial_room)
                self._initial_room = value
            elif key == PeerSetting.MAX_FRAME:
                self._max_frame = value
            elif key == PeerSetting.ENABLE_PUSH and value:
                raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "a server that takes pushes")
        self._answer(frame(SETTINGS, ACK, 0, b""))
        self._pump_all()
        if not self._settled:
            self._settled = True
            self._listener.settled()

    def _take_reset(self, one: IncomingFrame) -> None:
        stream = self._known(one)
        if stream is None:
            return
        self._drop(stream)
        code = int.from_bytes(one.payload, "big")
        if code == ErrorCode.REFUSED_STREAM:
            self._listener.refused(stream.id)
        else:
            self._listener.broken(stream.id, code)

    def _take_goaway(self, payload: bytes) -> None:
        self.draining = True
        last_id = int.from_bytes(payload[:4], "big") & LAST_STREAM_ID
        for stream in tuple(self._streams.values()):
            if stream.id > last_id:
                self._drop(stream)
                self._listener.refused(stream.id)

    def _end(self, stream: _ClientStream) -> None:
        """Forget a stream that the peer has answered in full."""
        unfinished = not stream.ended or self._is_unsent(stream)
        self._drop(stream)
        if unfinished:
            self._reset(stream.id, ErrorCode.CANCEL)

    def _break(self, stream: _ClientStream, code: ErrorCode) -> None:
        """End a stream on which the peer broke the protocol."""
        self._drop(stream)
        self._reset(stream.id, code)
        self._listener.broken(stream.id, code)

    def _drop(self, stream: _ClientStream) -> None:
        """Forget a stream, and what has not been taken of it."""
        del self._streams[stream.id]
        self._blocked.pop(stream.id, None)
        if stream.last < self._taken:
            return
        for at, (owner, size) in enumerate(self._owners):
            if owner is stream:
                self._chunks[at] = b""
                self._room += size
        self._pump_all()


def _is_informational(fields: Fields) -> bool:
    # A status comes first, as all fields with a colon do.
    return bool(fields) and fields[0][0] == b":status" and fields[0][1][:1] == b"1"
