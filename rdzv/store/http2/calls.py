# SPDX-License-Identifier: Apache-2.0
"""One call of gRPC each: how its answer comes together, and how it ended."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from rdzv.store.http2.frames import named_code
from rdzv.store.http2.header_blocks import Fields
from rdzv.store.http2.messages import (
    INTERNAL,
    OK,
    UNKNOWN,
    MalformedError,
    MessageReader,
    framed,
    status_in,
)


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
