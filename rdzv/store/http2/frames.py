# SPDX-License-Identifier: Apache-2.0
"""The frames of HTTP/2 (RFC 9113) and its header blocks (RFC 7541), from and to bytes. No I/O.

Header blocks go out as literals that no table knows, and come in by the package hpack. A connection
and its engine meet in ``EngineListener`` and ``Engine``: tests fill it with a second engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from struct import Struct
from typing import NamedTuple, Protocol

from hpack import Decoder, HPACKError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME_BYTES = 16384
"""Longest payload that this side takes, which is the default of HTTP/2."""

MOST_WINDOW = (1 << 31) - 1
"""Bound on every window, in bytes."""

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9

END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20
_MOST_FRAME = (1 << 24) - 1
_SETTING = Struct(">HL")
_HEAD = Struct(">HBBBL")
pack_head = _HEAD.pack
"""Makes the head of a frame: of the size but for its last byte, that byte, kind, flags, stream."""

_CONNECTION_ALONE = frozenset({SETTINGS, PING, GOAWAY})
_STREAMS_ALONE = frozenset({DATA, HEADERS, PRIORITY, RST_STREAM, CONTINUATION})
_SIZES = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}

MAX_LIST_BYTES = 65536
"""Bound on a header list, as HTTP/2 counts it: 32 bytes a field besides name and value."""

MOST_CONTINUATIONS = 32
"""Bound on the frames of one block, as they may be empty."""

KEPT_BLOCKS = 64
"""Bound on the blocks whose meaning is kept."""

NO_TABLE = b"\x20"
"""The first byte of each block out: its sender keeps no table, whatever size the peer allows."""


class ErrorCode(IntEnum):
    """The reasons that RST_STREAM and GOAWAY give."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class PeerSetting(IntEnum):
    """The settings that HTTP/2 has."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_STREAMS = 3
    INITIAL_WINDOW = 4
    MAX_FRAME = 5
    MAX_HEADER_LIST = 6


def named_code(code: int) -> str:
    """Return the name of a code, or its number if it has none."""
    try:
        return ErrorCode(code).name
    except ValueError:
        return f"code {code}"


class ConnectionFaultError(Exception):
    """The peer broke the protocol, so that nothing it sends can be understood any more."""

    def __init__(self, code: ErrorCode, what: str) -> None:
        super().__init__(what)
        self.code = code


class IncomingFrame(NamedTuple):
    """One frame that came in; ``payload`` is without padding and priority."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes
    counted: int
    """The bytes that it takes of the windows: padding counts."""


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """Return a frame as bytes."""
    size = len(payload)
    return pack_head(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def settings_frame(*settings: tuple[PeerSetting, int]) -> bytes:
    """Return a frame that announces settings."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*one) for one in settings))


def settings_in(payload: bytes) -> Iterator[tuple[int, int]]:
    """Yield the settings that a peer announces; raise ``ConnectionFaultError``."""
    for key, value in _SETTING.iter_unpack(payload):
        if key == PeerSetting.INITIAL_WINDOW:
            checked_window(value)
        elif key == PeerSetting.MAX_FRAME and not MAX_FRAME_BYTES <= value <= _MOST_FRAME:
            raise ConnectionFaultError(
                ErrorCode.PROTOCOL_ERROR, f"a largest frame of {value} bytes"
            )
        yield key, value


def checked_window(room: int) -> int:
    """Return a window; raise ``ConnectionFaultError`` if it is too large."""
    if room > MOST_WINDOW:
        raise ConnectionFaultError(ErrorCode.FLOW_CONTROL_ERROR, "a window too large")
    return room


def widened(room: int, payload: bytes) -> int:
    """Return a window after a WINDOW_UPDATE; raise ``ConnectionFaultError``."""
    more = int.from_bytes(payload, "big") & MOST_WINDOW
    if not more:
        raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "a window of 0 bytes more")
    return checked_window(room + more)


def check_opened(stream_id: int, last_id: int) -> None:
    """Raise ``ConnectionFaultError`` if no stream was opened that has this id."""
    if stream_id > last_id or not stream_id & 1:
        raise ConnectionFaultError(
            ErrorCode.PROTOCOL_ERROR, f"a frame on stream {stream_id}, which is not open"
        )


class FrameReader:
    """Cuts what comes in into frames, and checks each by itself."""

    def __init__(self) -> None:
        self._rest = b""
        self._begun = False

    def read(self, data: bytes) -> list[IncomingFrame]:
        """Return the frames that are whole by now; raise ``ConnectionFaultError``."""
        if self._rest:
            data = self._rest + data
        frames = []
        at, end = 0, len(data)
        while end - at >= 9:
            high, low, kind, flags, stream_id = _HEAD.unpack_from(data, at)
            size = high << 8 | low
            stream_id &= 0x7FFFFFFF
            if not self._begun:
                _check_first(data, kind, flags)
                self._begun = True
            if size > MAX_FRAME_BYTES:
                raise ConnectionFaultError(
                    ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes was announced"
                )
            after = at + 9 + size
            if after > end:
                break
            payload = data[at + 9 : after]
            at = after
            if kind <= CONTINUATION:
                # Almost all frames are of these kinds, and each call takes time.
                if not (stream_id if kind <= HEADERS else kind == WINDOW_UPDATE and size == 4):
                    _check(kind, flags, stream_id, size)
                if kind <= HEADERS and flags & (PADDED | HAS_PRIORITY):
                    payload = _stripped(kind, flags, payload)
                frames.append(IncomingFrame(kind, flags, stream_id, payload, size))
            else:
                # Of a kind that this side does not know: it may only not interrupt a header block.
                frames.append(IncomingFrame(kind, flags, stream_id, b"", 0))
        self._rest = data[at:] if at < end else b""
        return frames


def _check_first(data: bytes, kind: int, flags: int) -> None:
    if kind != SETTINGS or flags & ACK:
        said = "HTTP/1" if data.startswith(b"HTTP/1") else "no settings"
        raise ConnectionFaultError(
            ErrorCode.PROTOCOL_ERROR, f"what answers does not speak HTTP/2: it began with {said}"
        )


def _check(kind: int, flags: int, stream_id: int, size: int) -> None:
    """Raise ``ConnectionFaultError`` if there can be no such frame."""
    if kind == PUSH_PROMISE:
        raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "a push, which was switched off")
    if kind in (_STREAMS_ALONE if not stream_id else _CONNECTION_ALONE):
        raise ConnectionFaultError(
            ErrorCode.PROTOCOL_ERROR, f"a frame of kind {kind} on stream {stream_id}"
        )
    fits = size == _SIZES.get(kind, size)
    if kind == SETTINGS:
        fits = size == 0 if flags & ACK else size % 6 == 0
    elif kind == GOAWAY:
        fits = size >= 8
    if not fits:
        raise ConnectionFaultError(
            ErrorCode.FRAME_SIZE_ERROR, f"a frame of kind {kind} with {size} bytes"
        )


def _stripped(kind: int, flags: int, payload: bytes) -> bytes:
    """Return the payload of DATA or HEADERS without padding and priority."""
    start, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise ConnectionFaultError(ErrorCode.FRAME_SIZE_ERROR, "no room for the padding")
        start, end = 1, end - payload[0]
    if kind == HEADERS and flags & HAS_PRIORITY:
        start += 5
    if start > end:
        raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "more padding than there is frame")
    return payload[start:end]


Fields = tuple[tuple[bytes, bytes], ...]


def literal(name: bytes, value: bytes, *, secret: bool = False) -> bytes:
    """Return a field that is put into no table; a ``secret`` one by no proxy on the way either."""
    return b"".join(
        (
            b"\x10" if secret else b"\x00",
            _length(len(name)),
            name,
            _length(len(value)),
            value,
        )
    )


def _length(size: int) -> bytes:
    """Return a length as an integer with a prefix of seven bits, without Huffman coding."""
    if size < 0x7F:
        return bytes((size,))
    out, size = bytearray((0x7F,)), size - 0x7F
    while size >= 0x80:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out)


class BlockReader:
    """Puts a block together from HEADERS and CONTINUATION, which nothing may interrupt."""

    def __init__(self) -> None:
        self._begun: IncomingFrame | None = None
        self._parts: list[bytes] = []

    @property
    def partial(self) -> bool:
        """Whether a block has begun and not ended."""
        return self._begun is not None

    def take(self, one: IncomingFrame) -> tuple[IncomingFrame, bytes] | None:
        """Take a frame; return the HEADERS and the whole block if it ends with this frame.

        Raises ``ConnectionFaultError``.
        """
        if self._begun is None:
            if one.kind == CONTINUATION:
                raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "a continuation of nothing")
            if one.flags & END_HEADERS:
                return one, one.payload
            self._begun, self._parts = one, [one.payload]
            return None
        if one.kind != CONTINUATION or one.stream_id != self._begun.stream_id:
            raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
        self._parts.append(one.payload)
        if len(self._parts) > MOST_CONTINUATIONS or sum(map(len, self._parts)) > MAX_LIST_BYTES:
            raise ConnectionFaultError(ErrorCode.ENHANCE_YOUR_CALM, "a header block without end")
        if not one.flags & END_HEADERS:
            return None
        begun, self._begun = self._begun, None
        return begun, b"".join(self._parts)


class HeaderDecoder:
    """The meaning of the blocks that come in, all of which it must see, in order."""

    def __init__(self) -> None:
        self._decoder = Decoder(MAX_LIST_BYTES)
        self._kept: dict[bytes, Fields] = {}

    def decode(self, block: bytes) -> Fields:
        """Return the fields of a block; raise ``ConnectionFaultError``."""
        fields = self._kept.get(block)
        if fields is not None:
            return fields
        try:
            found: Iterable[tuple[bytes | str, bytes | str]] = self._decoder.decode(block, raw=True)
        except (HPACKError, IndexError, ValueError) as error:
            raise ConnectionFaultError(ErrorCode.COMPRESSION_ERROR, str(error)) from None
        fields = tuple((_bytes(name), _bytes(value)) for name, value in found)
        # A block of indices of one byte each changes no table: it means the same until another
        # block comes.
        if block and min(block) > 0x80 and max(block) < 0xFF:
            if len(self._kept) < KEPT_BLOCKS:
                self._kept[block] = fields
        else:
            self._kept.clear()
        return fields


def _bytes(text: bytes | str) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


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
