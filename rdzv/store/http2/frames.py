# SPDX-License-Identifier: Apache-2.0
"""The frames of HTTP/2 (RFC 9113), from and to bytes: all that can be judged of one by itself."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME_BYTES = 16384
"""Longest payload that this side takes, which is the default of HTTP/2."""

MOST_WINDOW = (1 << 31) - 1
"""Bound on every window, in bytes."""

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

_MOST_FRAME = (1 << 24) - 1
_SETTING = Struct(">HL")
_HEAD = Struct(">HBBBL")
pack_head = _HEAD.pack
"""Makes the head of a frame: of the size but for its last byte, that byte, kind, flags, stream."""

_CONNECTION_ALONE = frozenset({SETTINGS, PING, GOAWAY})
_STREAMS_ALONE = frozenset({DATA, HEADERS, PRIORITY, RST_STREAM, CONTINUATION})
_SIZES = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}


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
