# SPDX-License-Identifier: Apache-2.0
"""One client's connection: its session from the handshake to the end, and the memory it holds.

The server closes a connection only where torch's own server closes it too (bytes beyond the
protocol), or for a defect of its own: torch's client never reconnects, and its job would be lost.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from struct import Struct
from typing import Protocol, cast

from launcher_shim.c10d.request_order import BACKLOG_MAX, RelayNumbers, RequestOrder
from launcher_shim.tcpstore import wire
from launcher_shim.tcpstore.requests import RequestParser
from rdzv.dataclass import dataclass
from rdzv.errors import MusterError

_logger = logging.getLogger(__name__)

_DEFECT = "a defect of the sidecar, whose log has more"
_FLUSH_TIMEOUT_S = 1.0
_CREDENTIALS = Struct("3i")


class Session(Protocol):
    """The session of one client connection."""

    @property
    def whole(self) -> Mapping[bytes, bytes]:
        """Answers by the bytes of one request, or of several that came together.

        They are sent at once, without a call of ``handle``.
        """
        ...

    def keep(self, data: bytes, requests: Sequence[wire.Request]) -> None:
        """Note that ``requests``, whose bytes are ``data``, were all answered at once.

        Called within the same turn of the loop.
        """
        ...

    def handle(self, request: wire.Request) -> bytes | Awaitable[bytes]:
        """Return the answer, at once or later; ``b""`` for requests that have none.

        Never called for Validate, Ping and CancelWait, nor while an earlier request of the same
        connection is under way, except a Wait or Barrier. A request under way is cancelled if the
        client gives its Wait or Barrier up, or is gone. An exception closes the connection: a
        MusterError or FrameError is logged as its sentence, anything else with a traceback.
        """
        ...

    def closed(self) -> None:
        """End the session: the client is gone, its last writes stored or given up. Called once."""
        ...


OpenSession = Callable[[str, RelayNumbers | None], Session]
"""Creates the session of a client from a description of the peer, and its relay or None."""


@dataclass(frozen=True, slots=True)
class ConnectionOwner:
    """The part of a server that its connections use."""

    open_session: OpenSession
    """Called when the client has shown that it speaks the protocol."""
    joined: Callable[[Connection], None]
    """Called when a client has connected."""
    left: Callable[[Connection], None]
    """Called when the client is gone and none of its requests is under way."""
    swollen: Callable[[], None]
    """Called when an incomplete request has grown large."""
    handshake_timeout_s: float
    """Timeout of a client's handshake, in seconds. Longer: a client that is not torch's holds one
    of the connections for longer; shorter: a client on a busy node is refused."""
    last_writes_timeout_s: float
    """Total time for retries of the writes of a client that is gone, in seconds. Longer: they
    outlast a longer outage of the store; shorter: a fenced sidecar, which can never write them, is
    rid of them."""


class Connection(asyncio.Protocol):
    """One client's connection, served by its session. The server makes it, the loop drives it."""

    def __init__(self, host: ConnectionOwner) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._parser = RequestParser()
        self._transport: asyncio.Transport
        self._requests: RequestOrder
        self._session: Session | None = None
        self._peer = ""
        self._handshake: asyncio.TimerHandle | None = None
        self._last_writes: asyncio.TimerHandle | None = None
        self.gone: asyncio.Future[None] = self._loop.create_future()

    @property
    def held(self) -> int:
        """Bytes of this client's requests that are not complete yet."""
        return self._parser.held

    @property
    def relayed(self) -> bool:
        """Whether its client is behind a relay, and may outlive this process."""
        return self._requests.relayed

    def fail(self, reason: str) -> None:
        """Close the connection and log the reason; answers made so far are still sent."""
        if not self._requests.closing:
            _logger.warning("Closed the c10d connection of %s: %s", self._peer, reason)
            self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        """Close the connection for good: a relay gets a refusal."""
        self._requests.refuse(reason)
        self.shut()

    def shut(self) -> None:
        """Close the connection: answers made so far are sent, waiting requests are dropped."""
        self._parser = RequestParser()  # frees the bytes that it held
        self._requests.shut()
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._loop.call_later(_FLUSH_TIMEOUT_S, self._transport.abort)

    def give_up(self) -> None:
        """Close the connection, and cancel the request that the session is handling."""
        self.shut()
        self._requests.cancel_under_way()

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection, and start the timeout of the handshake."""
        self._transport = cast(asyncio.Transport, transport)
        self._requests = RequestOrder(
            self._transport, failed=self._fail_request, settled=self._finish
        )
        self._peer = _describe(self._transport)
        self._host.joined(self)
        timeout_s = self._host.handshake_timeout_s
        self._handshake = self._loop.call_later(
            timeout_s, self.fail, f"it sent no handshake within {timeout_s:g} s"
        )

    def data_received(self, data: bytes) -> None:
        """Parse bytes and handle the requests that they complete."""
        parser, session, order = self._parser, self._session, self._requests
        idle = parser.need == 1 and order.all_answered and not order.closing
        if idle and session is not None and (answer := session.whole.get(data)):
            order.answers.write(answer)
            return
        if order.closing:
            return
        try:
            requests = parser.feed(data)
        except wire.FrameError as error:
            self._fail_after(error)
            return
        if session is None and not (parser.greeted and self._open()):
            return
        if len(requests) == 1 and not order.waiting:  # as torch's own client sends them
            order.answer_now(requests[0])
        else:
            order.take(requests, len(data))
            if parser.held > BACKLOG_MAX:
                self._host.swollen()
        if (
            idle
            and session is not None
            and not order.relayed
            and parser.need == 1
            and order.all_answered
        ):
            # From now on the same bytes may be answered without being parsed.
            session.keep(data, requests)

    def pause_writing(self) -> None:
        """Stop making answers: the client does not read them."""
        self._requests.pause_answers()

    def resume_writing(self) -> None:
        """Make answers again: the client reads them."""
        self._requests.resume_answers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel requests that have an answer; retry the writes, for a limited time."""
        if self._handshake is not None:
            self._handshake.cancel()
        self._requests.lose()
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

    def _fail_after(self, error: wire.FrameError) -> None:
        """Close the connection once the requests before the faulty one are handled."""
        if not self._parser.greeted:
            self.fail(str(error))
            return
        self._requests.read_no_further()
        if self._session is None and not self._open():
            return
        self._requests.end_with(error)

    def _open(self) -> bool:
        if self._handshake is not None:
            self._handshake.cancel()
        order, preface = self._requests, self._parser.preface
        try:
            relay = order.relay(preface) if preface is not None else None
            self._session = self._host.open_session(self._peer, relay)
            order.begin(self._session.handle)
        except Exception:
            _logger.exception("Closed the c10d connection of %s: defect at its start", self._peer)
            self._refuse(_DEFECT)
            return False
        return True

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
        if self.gone.done():
            return
        if self._last_writes is not None:
            self._last_writes.cancel()
        self._host.left(self)
        self.gone.set_result(None)
        if self._session is not None:
            try:
                self._session.closed()
            except Exception:
                _logger.exception("Defect at the end of the connection of %s", self._peer)


def _describe(transport: asyncio.Transport) -> str:
    """Describe the peer: its address or, on a unix socket, process and user. Resolve nothing."""
    address = transport.get_extra_info("peername")
    if isinstance(address, tuple):
        return f"{address[0]}:{address[1]}"
    peer = transport.get_extra_info("socket")
    if peer is None:
        return "a unix client"
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return f"process {pid} of user {uid}"
