# SPDX-License-Identifier: Apache-2.0
"""One connection that carries calls of gRPC: deadlines, signs of life, and its end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from rdzv.store.http2.calls import (
    DEADLINE_EXCEEDED,
    Call,
    CallFailedError,
    StreamCall,
    UnaryCall,
    deadline_field,
    framed,
    request_head,
)
from rdzv.store.http2.engine import Http2Engine
from rdzv.store.http2.frames import ConnectionFaultError, Engine, EngineListener, Fields

PING_AFTER_S, PING_ANSWER_S = 6.0, 2.0
"""A frozen peer is detected after both, in seconds. etcd ends a connection that pings more often
than every 5 s, and one that pings while no call is under way."""

LATE_S = 0.1
"""Lateness of a timer, in seconds, that shows that this process stood still."""

READ_FIRST_S = 0.005
"""Time for what waits in the socket to be read before a late timer judges, in seconds."""

CLOSE_S = 1.0
"""Time for a connection to close in order, in seconds."""

KEPT_HEADS = 64

Metadata = tuple[tuple[str, str], ...]
MakeEngine = Callable[[EngineListener], Engine]


class Http2Connection(asyncio.Protocol):
    """A connection; create it as the protocol of a transport, then wait for ``settled_in``."""

    def __init__(self, scheme: str, authority: str, make_engine: MakeEngine = Http2Engine) -> None:
        self._loop = asyncio.get_running_loop()
        self._scheme = scheme
        self._authority = authority
        self._engine = make_engine(self)
        self._calls: dict[int, Call] = {}
        self._waiting: deque[tuple[Call, bytes, bytes, bool]] = deque()
        self._heads: dict[tuple[str, Metadata], bytes] = {}
        self._transport: asyncio.Transport | None = None
        self._settled: asyncio.Future[None] = self._loop.create_future()
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._why = ""
        self._retired = False
        self._paused = False
        self._answered = 0
        self._gathering = False
        self._heard_s = 0.0
        self._pulse: asyncio.TimerHandle | None = None
        self._pinged_s: float | None = None
        self._judge_s = 0.0

    @property
    def usable(self) -> bool:
        """Whether a new call may go over it."""
        return not (self._why or self._retired or self._engine.draining)

    @property
    def ended(self) -> bool:
        """Whether nothing goes over it any more."""
        return self._lost.done()

    async def settled_in(self) -> None:
        """Wait until the server has taken this connection; raise ``CallFailedError``."""
        await asyncio.shield(self._settled)

    async def unary(
        self, path: str, message: bytes, timeout_s: float, metadata: Metadata = ()
    ) -> bytes:
        """Send one message and return the one that answers it; raise ``CallFailedError``."""
        call = UnaryCall(self)
        head = self._head(path, metadata) + deadline_field(timeout_s)
        self._open(call, head, framed(message), ended=True)
        due_s = self._loop.time() + timeout_s
        timer = self._loop.call_at(due_s, self._expire, call, timeout_s, due_s)
        try:
            return await call.answer
        except CallFailedError as failed:
            if failed.code is None and failed.sent and self._loop.time() >= due_s:
                # The server has the same deadline, and resets what is over.
                failed.code = DEADLINE_EXCEEDED
            raise
        except asyncio.CancelledError:
            if not call.over:
                self.give_up(call)
                call.over = True
            elif not call.answer.cancelled():
                # Retrieve what the caller no longer waits for: asyncio would complain about it.
                call.answer.exception()
            raise
        finally:
            timer.cancel()

    def stream(self, path: str, metadata: Metadata = ()) -> StreamCall:
        """Open a stream of messages both ways; one that is over if that cannot be."""
        call = StreamCall(self)
        try:
            self._open(call, self._head(path, metadata), b"", ended=False)
        except CallFailedError as error:
            call.fail(error)
        return call

    def retire(self, grace_s: float) -> None:
        """Take no new calls; end those under way after ``grace_s``."""
        self._retired = True
        if not self._close_if_done():
            self._loop.call_later(grace_s, self.end, "this connection was closed")

    def end(self, why: str) -> None:
        """End all calls and the connection now."""
        if self._transport is not None and not self._transport.is_closing():
            if self._transport.get_write_buffer_size() or self._paused:
                # What lies there may never go away: the peer reads nothing.
                self._transport.abort()
            else:
                self._transport.close()
        self._fail_all(why)

    async def closed(self) -> None:
        """Wait until the connection has ended, for a while."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.shield(self._lost)
                return
        if self._transport is not None:
            self._transport.abort()

    # -- for calls

    def write(self, call: Call, data: bytes) -> None:
        """Send more data."""
        if not call.stream_id:
            # It waits for a stream of its own.
            self._waiting = deque(
                (one, head, body + data if one is call else body, ended)
                for one, head, body, ended in self._waiting
            )
            return
        self._engine.send(call.stream_id, data)
        self._flush()

    def consumed(self, call: Call, counted: int) -> None:
        """Let the server send so many bytes more."""
        self._engine.release(call.stream_id, counted)
        self._flush()

    def give_up(self, call: Call) -> bool:
        """End the call from here; return whether the server certainly never had all of it."""
        if not call.stream_id:
            self._waiting = deque(one for one in self._waiting if one[0] is not call)
            return True
        self._calls.pop(call.stream_id, None)
        unsent = self._engine.cancel(call.stream_id)
        self._flush()
        self._next_call()
        return unsent

    def _head(self, path: str, metadata: Metadata) -> bytes:
        head = self._heads.get((path, metadata))
        if head is None:
            if len(self._heads) >= KEPT_HEADS:
                self._heads.clear()
            head = request_head(self._scheme, self._authority, path, metadata)
            self._heads[path, metadata] = head
        return head

    def _open(self, call: Call, head: bytes, body: bytes, *, ended: bool) -> None:
        if not self.usable:
            why = self._why or "the server takes no more calls on this connection"
            raise CallFailedError(why, sent=False)
        if self._engine.full:
            self._waiting.append((call, head, body, ended))
            return
        call.stream_id = self._engine.begin(head, body, ended=ended)
        self._calls[call.stream_id] = call
        if self._pulse is None:
            self._heard_s, self._pinged_s = self._loop.time(), None
            self._beat_at(self._heard_s + PING_AFTER_S)
        self._flush()

    def _expire(self, call: UnaryCall, timeout_s: float, due_s: float) -> None:
        """End a call whose time is over, unless its answer has come and was not read yet."""
        if call.over:
            return
        if self._loop.time() - due_s > LATE_S:
            self._loop.call_later(READ_FIRST_S, self._expire, call, timeout_s, float("inf"))
            return
        unsent = self.give_up(call)
        why = f"no answer within {timeout_s:.1f} s"
        call.fail(CallFailedError(why, DEADLINE_EXCEEDED, sent=not unsent))

    def _next_call(self) -> None:
        """Begin what waited for a stream of its own."""
        while self._waiting and not self._engine.full and self.usable:
            call, head, body, ended = self._waiting.popleft()
            self._open(call, head, body, ended=ended)
        if not self.usable:
            self._refuse_waiting()
        self._close_if_done()

    def _refuse_waiting(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for call, *_ in waiting:
            call.fail(CallFailedError("the server takes no more calls here", sent=False))

    def _close_if_done(self) -> bool:
        """Close a connection that takes no new calls and has no old ones."""
        if self._calls or self._waiting or not (self._retired or self._engine.draining):
            return False
        self.end("this connection was closed")
        return True

    # -- for the engine

    def settled(self) -> None:
        """Note that the server has taken this connection."""
        if not self._settled.done():
            self._settled.set_result(None)
        self._next_call()

    def headers(self, stream_id: int, fields: Fields, ended: bool) -> None:
        """Pass headers or trailers on."""
        call = self._calls.pop(stream_id, None) if ended else self._calls.get(stream_id)
        if call is not None:
            call.take_fields(fields, ended)
            if ended:
                self._answered += 1
                self._next_call()

    def data(self, stream_id: int, data: bytes, counted: int, ended: bool) -> None:
        """Pass a piece of an answer on."""
        call = self._calls.pop(stream_id, None) if ended else self._calls.get(stream_id)
        if call is not None:
            call.take_data(data, counted, ended)
            if ended:
                self._next_call()

    def broken(self, stream_id: int, code: int) -> None:
        """Pass on that a stream was reset."""
        call = self._calls.pop(stream_id, None)
        if call is not None:
            call.broken(code)
            self._next_call()

    def refused(self, stream_id: int) -> None:
        """Pass on that a request was certainly not carried out."""
        call = self._calls.pop(stream_id, None)
        if call is not None:
            call.fail(CallFailedError("the server took no more calls here", sent=False))
            self._next_call()

    # -- for the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            self._abort("what answers does not speak HTTP/2 over TLS")
            return
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Feed what came in."""
        self._heard_s = self._loop.time()
        self._pinged_s = None
        if self._why:
            return
        self._answered = 0
        try:
            self._engine.feed(data)
        except ConnectionFaultError as fault:
            self._flush()
            self.end(f"the store broke HTTP/2: {fault}")
            return
        self._flush()
        if self._answered > 1 and not self._gathering:
            # Those who have their answers ask again: that goes out in one piece after the last.
            self._gathering = True
            self._loop.call_soon(self._end_gathering)
        if self._engine.draining and not self._why:
            self._refuse_waiting()
            self._close_if_done()

    def pause_writing(self) -> None:
        """Keep what is to go out, as the peer takes no more for now."""
        self._paused = True

    def resume_writing(self) -> None:
        """Send what was kept."""
        self._paused = False
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        """End every call."""
        self._fail_all(f"connection lost: {error or 'closed by the other side'}")
        if not self._lost.done():
            self._lost.set_result(None)

    def _end_gathering(self) -> None:
        self._gathering = False
        self._flush()

    def _flush(self) -> None:
        if self._gathering or self._paused:
            return
        if self._transport is None or self._transport.is_closing():
            return
        data = self._engine.take()
        if data:
            self._transport.write(data)

    def _abort(self, why: str) -> None:
        assert self._transport is not None
        self._transport.abort()
        self._fail_all(why)

    def _fail_all(self, why: str) -> None:
        if self._why:
            return
        self._why = why
        if self._pulse is not None:
            self._pulse.cancel()
        calls, self._calls = self._calls, {}
        for stream_id, call in calls.items():
            call.fail(CallFailedError(why, sent=not self._engine.unsent(stream_id)))
        self._refuse_waiting()
        if not self._settled.done():
            self._settled.set_exception(CallFailedError(why, sent=False))
            # Nobody need wait for it.
            self._settled.exception()

    def _beat_at(self, at_s: float) -> None:
        self._judge_s = at_s
        self._pulse = self._loop.call_at(at_s, self._beat)

    def _beat(self) -> None:
        """Ask a silent server for a sign of life while a call waits; end what does not answer."""
        self._pulse = None
        if not self._calls:
            return
        now = self._loop.time()
        if self._pinged_s is not None:
            if now - self._judge_s > LATE_S:
                # Its answer may wait in the socket.
                self._beat_at(now + READ_FIRST_S)
            else:
                self._abort(f"no sign of life for {now - self._heard_s:.1f} s")
        elif now - self._heard_s < PING_AFTER_S:
            self._beat_at(self._heard_s + PING_AFTER_S)
        else:
            self._pinged_s = now
            self._engine.ping()
            self._flush()
            self._beat_at(now + PING_ANSWER_S)
