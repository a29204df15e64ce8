# SPDX-License-Identifier: Apache-2.0
"""One call of gRPC each: what it gives HTTP/2, how its answer comes together, and how it ended."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Protocol
from urllib.parse import unquote_to_bytes

from rdzv.store.http2.frames import Fields, literal, named_code

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


class CallFailedError(Exception):
    """The end of a call without an answer.

    ``sent``: the server may have carried it out; if not, it certainly has not. ``code``: the
    server's, or the one by which gRPC calls what happened here; None if the connection ended.
    """

    def __init__(self, why: str, code: int | None = None, *, sent: bool = True) -> None:
        super().__init__(why)
        self.code = code
        self.sent = sent


class Carrier(Protocol):
    """The connection that carries a call."""

    def write(self, call: Call, data: bytes) -> None:
        """Send more data."""
        ...

    def consumed(self, call: Call, counted: int) -> None:
        """Let the server send so many bytes more."""
        ...

    def give_up(self, call: Call) -> bool:
        """End the call from here; return whether the server certainly never had all of it."""
        ...


class Call:
    """A call of either kind; ``code`` and ``text`` are the server's status."""

    __slots__ = ("carrier", "code", "error", "over", "reader", "stream_id", "text")

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self.stream_id = 0
        self.reader = MessageReader()
        self.code: int | None = None
        self.text = ""
        self.over = False
        self.error: CallFailedError | None = None
        """The reason of a bad end; None before the end, and after a good one."""

    def take_fields(self, fields: Fields, ended: bool) -> None:
        """Take headers or trailers."""
        code, text = status_in(fields)
        if code is not None:
            self.code, self.text = code, text
        if ended:
            self.end()

    def take_data(self, data: bytes, counted: int, ended: bool) -> None:
        """Take a piece of the answer."""
        raise NotImplementedError

    def end(self) -> None:
        """End, as the server has said all."""
        if self.code is None:
            self.fail(CallFailedError("the answer ended without a status", UNKNOWN))
        elif self.code != OK:
            self.fail(CallFailedError(self.text, self.code))
        elif self.reader.partial:
            self.fail(CallFailedError("the answer ended within a message", INTERNAL))
        else:
            self.settle(None)

    def broken(self, code: int) -> None:
        """End, as the stream was reset."""
        self.fail(CallFailedError(f"the stream was reset: {named_code(code)}"))

    def fail(self, error: CallFailedError) -> None:
        """End without an answer; nothing happens if it is over."""
        if not self.over:
            self.settle(error)

    def settle(self, error: CallFailedError | None) -> None:
        """Note the end, and wake who waits for it."""
        self.over, self.error = True, error


class UnaryCall(Call):
    """One message each way; ``answer`` is a future of it."""

    __slots__ = ("answer", "message")

    def __init__(self, carrier: Carrier) -> None:
        super().__init__(carrier)
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.message: bytes | None = None

    def take_data(self, data: bytes, counted: int, ended: bool) -> None:
        """Take a piece of the answer."""
        try:
            for message in self.reader.read(data):
                if self.message is not None:
                    raise MalformedError("there are two answers")
                self.message = message
        except MalformedError as error:
            self.carrier.give_up(self)
            self.fail(CallFailedError(str(error), INTERNAL))
            return
        if ended:
            self.end()
        else:
            self.carrier.consumed(self, counted)

    def settle(self, error: CallFailedError | None) -> None:
        """Note the end, and wake who waits for it."""
        if error is None and self.message is None:
            error = CallFailedError(
                "the server said that all is well, and gave no answer", INTERNAL
            )
        super().settle(error)
        if self.answer.done():
            return
        if error is not None:
            self.answer.set_exception(error)
        else:
            assert self.message is not None
            self.answer.set_result(self.message)


class StreamCall(Call):
    """Any number of messages each way. The server sends no more than is read, but for a window."""

    __slots__ = ("_messages", "_received", "_released", "_unread", "_waiter")

    def __init__(self, carrier: Carrier) -> None:
        super().__init__(carrier)
        self._messages: deque[bytes] = deque()
        self._unread = 0
        self._received = self._released = 0
        self._waiter: asyncio.Future[None] | None = None

    def write(self, message: bytes) -> None:
        """Send a message; raise ``CallFailedError`` if the stream is over."""
        if self.over:
            raise self.error or CallFailedError("the stream has ended", OK)
        self.carrier.write(self, framed(message))

    async def read(self) -> bytes | None:
        """Wait for a message; return None at a good end, or raise ``CallFailedError``."""
        while not self._messages:
            if self.over:
                if self.error is not None:
                    raise self.error
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        message = self._messages.popleft()
        self._unread -= len(message) + 5
        self._give_back()
        return message

    def cancel(self) -> None:
        """End the stream; who reads it gets None."""
        if not self.over:
            self._messages.clear()
            self.carrier.give_up(self)
            self.settle(None)

    def take_data(self, data: bytes, counted: int, ended: bool) -> None:
        """Take a piece of the answer."""
        self._received += counted
        try:
            for message in self.reader.read(data):
                self._messages.append(message)
                self._unread += len(message) + 5
        except MalformedError as error:
            self.carrier.give_up(self)
            self.fail(CallFailedError(str(error), INTERNAL))
            return
        if self._messages:
            self._wake()
        if ended:
            self.end()
        else:
            self._give_back()

    def settle(self, error: CallFailedError | None) -> None:
        """Note the end, and wake who waits for it."""
        super().settle(error)
        self._wake()

    def _give_back(self) -> None:
        """Give back all but what waits to be read: a message may be larger than the window."""
        counted = self._received - self._unread - self._released
        if counted > 0:
            self._released += counted
            self.carrier.consumed(self, counted)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
