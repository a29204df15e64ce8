# SPDX-License-Identifier: Apache-2.0
"""The order in which one client's requests are handled, and its answers sent.

Requests are handled strictly one after the other, except that a Wait or Barrier which cannot be
answered yet steps aside, as in torch's own server. Answers that a session has at once are written
in the same pass that read their requests.

Behind a relay, which outlives this sidecar, every answer carries its request's number, and a
request that has no answer is confirmed by an empty one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from launcher_shim.tcpstore import wire
from rdzv.errors import WireError


class RelayNumbers:
    """The request numbers of a client behind a relay; also stores its session's note there.

    ``number`` is that of the request being handled; ``again``: whether this sidecar or an earlier
    one may have carried it out already.
    """

    def __init__(self, preface: wire.Preface, keep: Callable[[bytes], None]) -> None:
        self.session = preface.session
        self.note = preface.note
        self.number = 0
        self.again = False
        self._repeated = deque(preface.again)
        self.following = preface.following
        self._keep = keep

    def next(self) -> int:
        """Assign and return the number of the next request."""
        self.again = bool(self._repeated)
        if self.again:
            self.number = self._repeated.popleft()
        else:
            self.number = self.following
            self.following += 1
        return self.number

    def keep(self, note: bytes) -> None:
        """Have the relay keep ``note`` for the next sidecar that it connects to.

        A note that is too long is not kept: the store has most of it.
        """
        if note != self.note and len(note) <= wire.NOTE_MAX:
            self.note = note
            self._keep(note)


BACKLOG_MAX = 64 * 1024
"""Bytes of requests that may wait behind another one; beyond, the client is not read further."""
PARKED_MAX = 64
"""Maximum number of unanswered Waits and Barriers of one client; torch's own has one at a time."""

_BURST = 256
"""Requests handled before the other connections get their turn."""
_FLUSH_BYTES = 64 * 1024
"""Size at which answers are written at once, without waiting for the end of the pass."""

_NOT_FOR_SESSIONS = frozenset({wire.Validate, wire.Ping, wire.CancelWait})


class AnswerBuffer:
    """The answers that are not written yet: those of one pass are written together.

    They are written in the order given, and none once the client is gone.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self.write = transport.write
        self._answers: list[bytes] = []
        self.add = self._answers.append  # the list's own: it is called for every request
        """Append an answer, to be written with the next flush."""
        self._lost = False

    def send(self, answer: bytes) -> None:
        """Write ``answer`` now, after those before it; do nothing if it is empty."""
        if answer and not self._answers and not self._lost:
            self.write(answer)
        elif answer:
            self._answers.append(answer)
            self.flush()

    def flush(self) -> None:
        """Write all answers."""
        answers = self._answers
        if answers and not self._lost:
            self.write(answers[0] if len(answers) == 1 else b"".join(answers))
        answers.clear()

    def lose(self) -> None:
        """Drop answers from now on: the client is gone."""
        self._lost = True


class RequestOrder:
    """The requests of one connection, handled in their order.

    ``failed`` is called with a request that could not be answered and its error; ``settled`` once
    the client is gone and none of its requests is under way.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        failed: Callable[[object, BaseException], None],
        settled: Callable[[], None],
    ) -> None:
        self.answers = AnswerBuffer(transport)
        self.closing = False
        self._transport = transport
        self._failed = failed
        self._all_settled = settled
        self._loop = asyncio.get_running_loop()
        self._relay: RelayNumbers | None = None
        self._handle: Callable[[wire.Request], bytes | Awaitable[bytes]]
        self._pending: deque[wire.Request | wire.FrameError] = deque()
        self._backlog = 0
        self._under_way: tuple[asyncio.Future[bytes], wire.Request, int] | None = None
        self._parked: dict[asyncio.Future[bytes], int] = {}
        self._answers_unread = False
        self._reading_paused = False
        self._next_burst: asyncio.Handle | None = None
        self._lost = False

    @property
    def relayed(self) -> bool:
        """Whether the client is behind a relay."""
        return self._relay is not None

    @property
    def waiting(self) -> bool:
        """Whether a new request would have to wait for its turn."""
        return bool(self._pending or self._under_way or self._answers_unread or self.closing)

    @property
    def all_answered(self) -> bool:
        """Whether no request is without its answer."""
        return not (self._pending or self._under_way or self._parked or self._answers_unread)

    def relay(self, preface: wire.Preface) -> RelayNumbers:
        """Begin to number answers, for the relay that the client is behind."""
        self._relay = RelayNumbers(preface, self._send_note)
        return self._relay

    def begin(self, handle: Callable[[wire.Request], bytes | Awaitable[bytes]]) -> None:
        """Have requests handled by ``handle`` from now on."""
        self._handle = handle

    def answer_now(self, request: wire.Request) -> None:
        """Handle a request at once, as no other is before it."""
        if answer := self._answer(request):
            self.answers.send(answer)

    def take(self, requests: Sequence[wire.Request], size: int) -> None:
        """Queue requests of ``size`` bytes; each is handled in its turn."""
        self._pending.extend(requests)
        self._backlog += size
        self._advance()

    def end_with(self, error: wire.FrameError) -> None:
        """Handle the requests before a malformed one, and then fail."""
        self._pending.extend(error.before)
        self._pending.append(error)
        self._advance()

    def read_no_further(self) -> None:
        """Pause reading until all requests are handled."""
        self._transport.pause_reading()
        self._reading_paused = True

    def pause_answers(self) -> None:
        """Stop making answers: the client does not read them."""
        self._answers_unread = True

    def resume_answers(self) -> None:
        """Make answers again: the client reads them."""
        self._answers_unread = False
        self._advance()

    def refuse(self, reason: str) -> None:
        """Have a relay close its client, with ``reason``: it would reconnect otherwise."""
        if self._relay is not None and not self.closing:
            self.answers.add(wire.numbered(wire.REFUSAL, reason.encode()))

    def shut(self) -> None:
        """Send the answers made so far, and drop the requests that wait."""
        self.closing = True
        self._pending.clear()
        self.answers.flush()

    def cancel_under_way(self) -> None:
        """Cancel the request that the session is handling."""
        if self._under_way is not None:
            self._under_way[0].cancel()

    def lose(self) -> None:
        """Cancel requests that have an answer, as no client reads it; go on with the writes."""
        self.closing = self._lost = True
        self.answers.lose()
        self._answers_unread = False
        self._cancel_parked()
        if self._under_way is not None and not isinstance(self._under_way[1], wire.SILENT):
            self._under_way[0].cancel()
        self._pending = deque(r for r in self._pending if isinstance(r, wire.SILENT))
        self._advance()

    def _advance(self) -> None:
        """Handle requests until one has to wait, or it is the turn of other connections."""
        if self._next_burst is not None:
            self._next_burst.cancel()
            self._next_burst = None
        pending, add, size = self._pending, self.answers.add, 0
        for _ in range(_BURST):
            if not pending or self._under_way is not None or self._answers_unread:
                break
            if answer := self._answer(pending.popleft()):
                add(answer)
                size += len(answer)
                if size > _FLUSH_BYTES:
                    self.answers.flush()
                    size = 0
        else:
            if pending:
                self._next_burst = self._loop.call_soon(self._advance)
        self.answers.flush()
        self._regulate()

    def _regulate(self) -> None:
        """Pause, resume or finish, depending on the backlog."""
        if self._pending:
            if self._backlog > BACKLOG_MAX and not self._reading_paused and not self.closing:
                self.read_no_further()
            return
        self._backlog = 0
        if self._reading_paused and not self.closing:
            self._reading_paused = False
            self._transport.resume_reading()
        if self._lost and self._under_way is None:
            self._all_settled()

    def _answer(self, request: wire.Request | wire.FrameError) -> bytes:
        """Handle a request; return the answer if there is one now, else ``b""``.

        Behind a relay it is numbered.
        """
        relay, number = self._relay, 0
        try:
            if relay is not None:
                if isinstance(request, wire.Validate):
                    return b""
                number = relay.next()
            if type(request) in _NOT_FOR_SESSIONS or isinstance(request, wire.FrameError):
                alone = self._answer_alone(request)
                return alone if relay is None else wire.numbered(number, alone)
            answer = self._handle(request)
            if self._parked:
                self._release_parked()
            if isinstance(answer, bytes):
                return answer if relay is None else wire.numbered(number, answer)
            self._defer(answer, request, number)
        except Exception as error:
            self._failed(request, error)
        return b""

    def _send_note(self, note: bytes) -> None:
        self.answers.send(wire.numbered(wire.NOTE, note))

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
        """Send the answer of the request under way, and go on to the next."""
        assert self._under_way is not None
        _, request, number = self._under_way
        self._under_way = None
        self.answers.send(self._outcome(future, request, number))
        self._advance()

    def _release_parked(self) -> None:
        """Answer the waits that the request just handled has ended, ahead of its own answer."""
        for future in [future for future in self._parked if future.done()]:
            self._released(future)

    def _released(self, future: asyncio.Future[bytes]) -> None:
        """Answer a Wait or Barrier that has ended, unless the client gave it up."""
        if future in self._parked:
            number = self._parked.pop(future)
            self.answers.send(self._outcome(future, "a wait", number))
        elif not future.cancelled():
            future.exception()

    def _outcome(self, future: asyncio.Future[bytes], request: object, number: int) -> bytes:
        try:
            answer = future.result()
            return answer if self._relay is None else wire.numbered(number, answer)
        except asyncio.CancelledError as error:
            if not self.closing:
                self._failed(request, error)
        except Exception as error:
            self._failed(request, error)
        return b""

    def _cancel_parked(self) -> None:
        parked, self._parked = self._parked, {}
        for future in parked:
            future.cancel()
