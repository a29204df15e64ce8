# SPDX-License-Identifier: Apache-2.0
"""The contents that gRPC gives HTTP/2: headers, messages with a head of five bytes, the status."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from urllib.parse import unquote_to_bytes

from rdzv.store.http2.header_blocks import Fields, literal

OK, UNKNOWN, DEADLINE_EXCEEDED, INTERNAL = 0, 2, 4, 13
"""The status codes of gRPC that the client itself gives; UNKNOWN is also for one without a code."""

MAX_MESSAGE_BYTES = 256 << 20
"""Bound on one message that comes in: more than a store of ours ever holds in one answer."""

SECRETS = frozenset({"token"})
"""Metadata that no proxy may put into a table."""

_STATUS_OF_HTTP = {400: 13, 401: 16, 403: 7, 404: 12, 429: 14, 502: 14, 503: 14, 504: 14}
_MOST_DIGITS = 10**8

KEPT = 64
"""Bound on the deadlines and on the statuses that are kept: almost all calls have the same."""


class MalformedError(Exception):
    """The peer sent something that is no message of gRPC."""


def request_head(
    scheme: str, authority: str, path: str, metadata: Iterable[tuple[str, str]]
) -> bytes:
    """Return the header block of a call, but for its deadline."""
    fields = (
        (":method", "POST"),
        (":scheme", scheme),
        (":path", path),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        ("user-agent", "muster"),
    )
    head = [literal(name.encode(), value.encode()) for name, value in fields]
    head += [
        literal(name.encode(), value.encode(), secret=name in SECRETS) for name, value in metadata
    ]
    return b"".join(head)


def deadline_field(timeout_s: float) -> bytes:
    """Return the header that tells the server how long the client waits."""
    return _deadline_of(max(int(timeout_s * 1000), 1))


@lru_cache(KEPT)
def _deadline_of(timeout_ms: int) -> bytes:
    if timeout_ms < _MOST_DIGITS:
        return literal(b"grpc-timeout", b"%dm" % timeout_ms)
    return literal(b"grpc-timeout", b"%dS" % min(timeout_ms // 1000, _MOST_DIGITS - 1))


def framed(message: bytes) -> bytes:
    """Return a message with its head."""
    return b"\0" + len(message).to_bytes(4, "big") + message


class MessageReader:
    """Puts the messages of one stream together, none of more than ``limit`` bytes."""

    __slots__ = ("_buffer", "_limit")

    def __init__(self, limit: int = MAX_MESSAGE_BYTES) -> None:
        self._buffer = bytearray()
        self._limit = limit

    @property
    def partial(self) -> bool:
        """Whether a message has begun and not ended."""
        return bool(self._buffer)

    def read(self, data: bytes) -> Iterable[bytes]:
        """Return the messages that are whole by now, to be gone through once.

        Raises ``MalformedError`` after those that came before what is none.
        """
        if not self._buffer and len(data) >= 5 and len(data) == 5 + _size_in(data, 0, self._limit):
            return (data[5:],)
        return self._cut(data)

    def _cut(self, data: bytes) -> Iterator[bytes]:
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= 5:
                first = start + 5
                size = _size_in(buffer, start, self._limit)
                if len(buffer) - first < size:
                    break
                start = first + size
                yield bytes(memoryview(buffer)[first:start])
        except MalformedError:
            start = len(buffer)
            raise
        finally:
            del buffer[:start]


def _size_in(buffer: bytes | bytearray, start: int, limit: int) -> int:
    """Return the size of the message whose head begins at ``start``."""
    if buffer[start]:
        raise MalformedError("a message is compressed, which was not asked for")
    size = int.from_bytes(buffer[start + 1 : start + 5], "big")
    if size > limit:
        raise MalformedError(f"a message of {size} bytes was announced")
    return size


@lru_cache(KEPT)
def status_in(fields: Fields) -> tuple[int | None, str]:
    """Return code and message of headers or trailers; no code if they have none."""
    code: int | None = None
    message = ""
    http = 200
    for name, value in fields:
        if name == b"grpc-status":
            code = int(value) if value.isdigit() and int(value) <= 16 else UNKNOWN
        elif name == b"grpc-message":
            message = unquote_to_bytes(value).decode("utf-8", "replace")
        elif name == b":status" and value != b"200":
            http = int(value) if value.isdigit() else 0
    if code is None and http != 200:
        return _STATUS_OF_HTTP.get(
            http, UNKNOWN
        ), f"it answers with HTTP status {http}, as no HTTP/2 server of gRPC does"
    return code, message
