# SPDX-License-Identifier: Apache-2.0
"""One client's connection: the order of its requests, and how much of it is held in memory.

Requests are handled strictly one after the other, except that a Wait or Barrier which cannot be
answered yet steps aside, as in torch's own server. Answers that a session has at once are written
in the same pass that read their requests.

We close a connection only where torch's own server closes it too (bytes beyond the protocol), or
for a defect of ours: torch's client never reconnects, and its job would be lost.

Behind a relay, which outlives us, every answer carries its request's number, and a request that
has no answer is confirmed by an empty one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import cast

from launcher_shim.c10d.serving.peer import describe_peer
from launcher_shim.c10d.serving.relayed import RelayNumbers
from launcher_shim.c10d.serving.served import OpenSession, Session
from launcher_shim.tcpstore import wire
from launcher_shim.tcpstore.parser import RequestParser
from rdzv.errors import MusterError, WireError

_logger = logging.getLogger(__name__)

BACKLOG_MAX = 64 * 1024
"""Bytes of requests that may wait behind another one; then the client is not read further."""
PARKED_MAX = 64
"""Unanswered Waits and Barriers of one client; torch's own has one at a time."""

_BURST = 256
"""Requests handled before the other connections get their turn."""
_FLUSH = 64 * 1024
_DEFECT = "a defect of the sidecar, whose log has more"
_FLUSH_TIMEOUT_S = 1.0

_NOT_FOR_SESSIONS = frozenset({wire.Validate, wire.Ping, wire.CancelWait})


@dataclass(frozen=True, slots=True)
class ConnectionOwner:
    """What a connection needs of its server. ``left`` is called when all is over and settled.

    ``swollen`` is called when a request that is not complete yet has grown large.
    """

    open_session: OpenSession
    joined: Callable[[Connection], None]
    left: Callable[[Connection], None]
    swollen: Callable[[], None]
    handshake_timeout_s: float
    last_writes_timeout_s: float


class Connection(asyncio.Protocol):
    """Serves one client by its session. Made by the server, driven by the event loop."""

    def __init__(self, host: ConnectionOwner) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._parser = RequestParser()
        self._transport: asyncio.Transport
        self._write: Callable[[bytes], None]
        self._session: Session | None = None
        self._relay: RelayNumbers | None = None
        self._handle: Callable[[wire.Request], bytes | Awaitable[bytes]]
        self._peer = ""
        self._handshake: asyncio.TimerHandle | None = None
        self._last_writes: asyncio.TimerHandle | None = None
        self._pending: deque[wire.Request | wire.FrameError] = deque()
        self._backlog = 0
        self._answers: list[bytes] = []
        self._under_way: tuple[asyncio.Future[bytes], wire.Request, int] | None = None
        self._parked: dict[asyncio.Future[bytes], int] = {}
        self._answers_unread = False
        self._reading_paused = False
        self._next_burst: asyncio.Handle | None = None
        self._closing = False
        self._lost = False
        self.gone: asyncio.Future[None] = self._loop.create_future()

    @property
    def held(self) -> int:
        """Bytes of this client's requests that are not complete yet."""
        return self._parser.held

    @property
    def relayed(self) -> bool:
        """Whether its client is behind a relay, and may outlive this process."""
        return self._relay is not None

    def fail(self, reason: str) -> None:
        """Close the connection and say why; answers on their way are still sent."""
        if not self._closing:
            _logger.warning("Closed the c10d connection of %s: %s", self._peer, reason)
            self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        """Close the connection for good: a relay would come back otherwise."""
        if self._relay is not None and not self._closing:
            self._answers.append(wire.numbered(wire.REFUSAL, reason.encode()))
        self.shut()

    def shut(self) -> None:
        """Close the connection: what is on its way is sent, what waits is dropped."""
        self._closing = True
        self._pending.clear()
        self._parser = RequestParser()  # what it held is free now
        self._flush()
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._loop.call_later(_FLUSH_TIMEOUT_S, self._transport.abort)

    def give_up(self) -> None:
        """Close the connection, and cancel what the session has under way."""
        self.shut()
        if self._under_way is not None:
            self._under_way[0].cancel()

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Give the client some time to say what it is."""
        self._transport = cast(asyncio.Transport, transport)
        self._write = self._transport.write
        self._peer = describe_peer(self._transport)
        self._host.joined(self)
        timeout_s = self._host.handshake_timeout_s
        self._handshake = self._loop.call_later(
            timeout_s, self.fail, f"it sent no handshake within {timeout_s:g} s"
        )

    def data_received(self, data: bytes) -> None:
        """Take bytes and handle the requests that they complete."""
        parser, session = self._parser, self._session
        idle = parser.need == 1 and not (
            self._pending
            or self._under_way
            or self._parked
            or self._answers_unread
            or self._closing
        )
        if idle and session is not None and (answer := session.whole.get(data)):
            self._write(answer)
            return
        if self._closing:
            return
        try:
            requests = parser.feed(data)
        except wire.FrameError as error:
            self._fail_after(error)
            return
        if session is None and not (parser.greeted and self._open()):
            return
        if len(requests) == 1 and not (
            self._pending or self._under_way or self._answers_unread or self._closing
        ):  # what torch's own client does
            if answer := self._answer(requests[0]):
                self._send(answer)
        else:
            self._pending.extend(requests)
            self._backlog += len(data)
            self._advance()
            if parser.held > BACKLOG_MAX:
                self._host.swollen()
        if idle and session is not None and self._relay is None and parser.need == 1:
            self._keep(session, data, requests)

    def _keep(self, session: Session, data: bytes, requests: Sequence[wire.Request]) -> None:
        """Let what was asked now be answered by its bytes alone, if all of it has been answered."""
        if not (self._pending or self._under_way or self._parked or self._answers_unread):
            session.keep(data, requests)

    def pause_writing(self) -> None:
        """The client does not read its answers: make no more of them."""
        self._answers_unread = True

    def resume_writing(self) -> None:
        """The client reads its answers again."""
        self._answers_unread = False
        self._advance()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel what nobody is left to read; what the client had set before is still tried."""
        self._closing = self._lost = True
        self._answers_unread = False
        if self._handshake is not None:
            self._handshake.cancel()
        self._cancel_parked()
        if self._under_way is not None and not isinstance(self._under_way[1], wire.SILENT):
            self._under_way[0].cancel()
        self._pending = deque(r for r in self._pending if isinstance(r, wire.SILENT))
        self._advance()
        if not self.gone.done():
            timeout_s = self._host.last_writes_timeout_s
            self._last_writes = self._loop.call_later(timeout_s, self._give_up_last_writes)

    def _give_up_last_writes(self) -> None:
        _logger.warning(
            "Giving up what %s set before it disconnected: not stored within %g s",
            self._peer,
            self._host.last_writes_timeout_s,
        )
        self.give_up()

    # --- the order of requests ---

    def _fail_after(self, error: wire.FrameError) -> None:
        """Close the connection once the requests before the faulty one are handled."""
        if not self._parser.greeted:
            self.fail(str(error))
            return
        self._transport.pause_reading()
        self._reading_paused = True
        if self._session is None and not self._open():
            return
        self._pending.extend(error.before)
        self._pending.append(error)
        self._advance()

    def _open(self) -> bool:
        if self._handshake is not None:
            self._handshake.cancel()
        try:
            if self._parser.preface is not None:
                self._relay = RelayNumbers(self._parser.preface, self._send_note)
            self._session = self._host.open_session(self._peer, self._relay)
            self._handle = self._session.handle
        except Exception:
            _logger.exception("Closed the c10d connection of %s: defect at its start", self._peer)
            self._refuse(_DEFECT)
            return False
        return True

    def _advance(self) -> None:
        """Handle requests until one has to wait, or it is the turn of other connections."""
        if self._next_burst is not None:
            self._next_burst.cancel()
            self._next_burst = None
        pending = self._pending
        answers = self._answers
        size = 0
        for _ in range(_BURST):
            if not pending or self._under_way is not None or self._answers_unread:
                break
            answer = self._answer(pending.popleft())
            if answer:
                answers.append(answer)
                size += len(answer)
                if size > _FLUSH:
                    self._flush()
                    size = 0
        else:
            if pending:
                self._next_burst = self._loop.call_soon(self._advance)
        if answers:
            self._flush()
        self._regulate()

    def _regulate(self) -> None:
        """Read on, pause or finish, as what is left to do demands."""
        if self._pending:
            if self._backlog > BACKLOG_MAX and not self._reading_paused and not self._closing:
                self._reading_paused = True
                self._transport.pause_reading()
            return
        self._backlog = 0
        if self._reading_paused and not self._closing:
            self._reading_paused = False
            self._transport.resume_reading()
        if self._lost and self._under_way is None and not self.gone.done():
            self._finish()

    def _answer(self, request: wire.Request | wire.FrameError) -> bytes:
        """Return what to send now; ``b""`` if that is nothing, or comes later."""
        try:
            if self._relay is not None:
                return self._answer_relay(self._relay, request)
            if type(request) in _NOT_FOR_SESSIONS or isinstance(request, wire.FrameError):
                return self._answer_alone(request)
            answer = self._handle(request)
            if self._parked:
                self._release_parked()
            if isinstance(answer, bytes):
                return answer
            self._defer(answer, request, 0)
        except Exception as error:
            self._fail_request(request, error)
        return b""

    def _answer_relay(self, relay: RelayNumbers, request: wire.Request | wire.FrameError) -> bytes:
        """Do the same for a request that has a number."""
        if isinstance(request, wire.Validate):
            return b""
        number = relay.next()
        if type(request) in _NOT_FOR_SESSIONS or isinstance(request, wire.FrameError):
            return wire.numbered(number, self._answer_alone(request))
        answer = self._handle(request)
        if self._parked:
            self._release_parked()
        if isinstance(answer, bytes):
            return wire.numbered(number, answer)
        self._defer(answer, request, number)
        return b""

    def _send_note(self, note: bytes) -> None:
        self._send(wire.numbered(wire.NOTE, note))

    def _answer_alone(self, request: wire.Request | wire.FrameError) -> bytes:
        if isinstance(request, wire.FrameError):
            raise request
        if isinstance(request, wire.Ping):
            return wire.pong(request.nonce)
        if isinstance(request, wire.CancelWait):
            self._cancel_parked()
            return wire.WAIT_CANCELED
        return b""

    def _defer(self, answer: Awaitable[bytes], request: wire.Request, number: int) -> None:
        future = asyncio.ensure_future(answer)
        if not isinstance(request, wire.PATIENT):
            self._under_way = future, request, number
            future.add_done_callback(self._settled)
            return
        self._parked[future] = number
        future.add_done_callback(self._released)
        if len(self._parked) > PARKED_MAX:
            raise WireError(f"it waits for more than {PARKED_MAX} things at once")

    def _settled(self, future: asyncio.Future[bytes]) -> None:
        """What held the later requests back is done."""
        assert self._under_way is not None
        _, request, number = self._under_way
        self._under_way = None
        self._send(self._outcome(future, request, number))
        self._advance()

    def _release_parked(self) -> None:
        """Answer the waits that the request just handled has ended, before its own answer."""
        for future in [future for future in self._parked if future.done()]:
            number = self._parked.pop(future)
            if answer := self._outcome(future, "a wait", number):
                self._answers.append(answer)

    def _released(self, future: asyncio.Future[bytes]) -> None:
        """A Wait or Barrier is over; if the client gave it up, nobody wants its answer."""
        if future in self._parked:
            number = self._parked.pop(future)
            self._send(self._outcome(future, "a wait", number))
        elif not future.cancelled():
            future.exception()

    def _outcome(self, future: asyncio.Future[bytes], request: object, number: int) -> bytes:
        try:
            answer = future.result()
            return answer if self._relay is None else wire.numbered(number, answer)
        except asyncio.CancelledError as error:
            if not self._closing:
                self._fail_request(request, error)
        except Exception as error:
            self._fail_request(request, error)
        return b""

    def _send(self, answer: bytes) -> None:
        if answer and not self._answers and not self._lost:
            self._transport.write(answer)
        elif answer:
            self._answers.append(answer)
            self._flush()

    def _flush(self) -> None:
        answers = self._answers
        if answers and not self._lost:
            self._transport.write(answers[0] if len(answers) == 1 else b"".join(answers))
        answers.clear()

    def _cancel_parked(self) -> None:
        parked, self._parked = self._parked, {}
        for future in parked:
            future.cancel()

    def _fail_request(self, request: object, error: BaseException) -> None:
        if isinstance(error, (MusterError, wire.FrameError)):
            self.fail(str(error))
            return
        _logger.error(
            "Closed the c10d connection of %s: defect in %s",
            self._peer,
            type(request).__name__,
            exc_info=error,
        )
        self._refuse(_DEFECT)

    def _finish(self) -> None:
        if self._last_writes is not None:
            self._last_writes.cancel()
        self._host.left(self)
        self.gone.set_result(None)
        if self._session is not None:
            try:
                self._session.closed()
            except Exception:
                _logger.exception("Defect at the end of the connection of %s", self._peer)
