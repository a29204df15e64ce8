# SPDX-License-Identifier: Apache-2.0
"""The rendezvous port of the training container: every connection is relayed to the sidecar.

torch's client never reconnects, so its connection ends here, in a process that lives as long as the
container. While the sidecar is away, frozen or being replaced, the client waits. After a reconnect
the sidecar gets each client's session and its unanswered requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from typing import Awaitable, Callable, Deque, List, Optional, Set, Tuple, cast

import launcher_shim.tcpstore.wire as wire
from launcher_shim.rundir.layout import bind_loopback, socket_of
from launcher_shim.tcpstore.requests import RelayLedger, RequestParser, round_begun_by

log = logging.getLogger(__name__)

CLIENTS_MAX = 256
"""Maximum number of clients: as many as the sidecar serves."""
HELD_MAX = 1024 * 1024
"""Backpressure: with this many bytes of unanswered requests, a client is not read further."""
HANDSHAKE_TIMEOUT_S = 30.0
RETRY_MIN_S, RETRY_MAX_S = 0.05, 0.5
"""Retry interval of a connection to the sidecar: it grows from the first to the second."""
SETTLED_S = 1.0
"""A connection that lasted this long resets the retry interval."""
FAREWELL_S = 1.0
"""Timeout for requests that are on their way to the sidecar when the container ends."""
LAST_ANSWER_S = 0.5
"""Time for which a launcher that got SIGTERM may wait for an answer, in seconds: until the answer
has come, or the connection is closed, torch handles no signal."""


async def _nothing() -> None:
    pass


class Relay:
    """The relay from both loopback addresses at ``port`` to the socket at ``path``.

    ``clear`` ends what worlds that have ended left behind. A torchrun waits for it before it starts
    the workers of a world; it is called again when the torchrun has ended.
    """

    def __init__(
        self, port: int, path: str, clear: Callable[[], Awaitable[None]] = _nothing
    ) -> None:
        self.port = port
        self.path = path
        self.clear = clear
        self.clients: Set[Client] = set()
        self.took_part = False
        """Whether a torchrun of this container has been in a rendezvous."""
        self._servers: List[asyncio.AbstractServer] = []
        self._hurried = False
        self._container = os.urandom(wire.CONTAINER_BYTES)

    async def listen(self) -> None:
        """Take the port; raises ``OSError`` if it is taken."""
        loop = asyncio.get_running_loop()
        for bound in bind_loopback(self.port):
            self._servers.append(await loop.create_server(self._accept, sock=bound, backlog=256))

    async def close(self) -> None:
        """Close every client's connection, and tell the sidecar if it is connected."""
        for server in self._servers:
            server.close()
        clients = list(self.clients)
        for client in clients:
            client.shut()
        relaying = [client.relaying for client in clients if client.connected]
        if relaying:
            await asyncio.wait([task for task in relaying if task is not None], timeout=FAREWELL_S)
        for client in clients:
            if client.relaying is not None:
                client.relaying.cancel()

    def renew(self) -> None:
        """Treat later connections as those of a new container: the command begins from the start.

        Its torchrun may pass over stages that have ended well, as after a restart of the container.
        """
        self._container = os.urandom(wire.CONTAINER_BYTES)
        self.took_part = False

    def hurry(self) -> None:
        """Let no launcher wait long for an answer any more, because they got SIGTERM."""
        self._hurried = True
        for client in tuple(self.clients):
            client.hurry()

    def _accept(self) -> Client:
        name = self._container + os.urandom(wire.SESSION_BYTES - wire.CONTAINER_BYTES)
        client = Client(self, name)
        if self._hurried:
            client.hurry()
        return client


class Client(asyncio.Protocol):
    """One launcher's connection, and its counterpart to the sidecar."""

    def __init__(self, relay: Relay, name: bytes) -> None:
        self.relaying: Optional[asyncio.Task[None]] = None
        self._container = relay
        self._parser = RequestParser()
        self._ledger = RelayLedger(name)
        self._transport: asyncio.Transport
        self._handshake: Optional[asyncio.TimerHandle] = None
        self._link: Optional[Link] = None
        self._reading_paused = False
        self._fault = ""
        self._gone = False
        self._hurried = False
        self._overdue: Optional[asyncio.TimerHandle] = None
        self._met = -1
        self._clearing: Optional[asyncio.Task[None]] = None
        self._kept_back: Deque[wire.Request] = deque()

    @property
    def connected(self) -> bool:
        """Whether it is connected to the sidecar."""
        return self._link is not None

    def shut(self) -> None:
        """Close the client's connection."""
        if not self._gone:
            self._transport.close()

    def hurry(self) -> None:
        """Close the connection from now on if an answer takes longer than ``LAST_ANSWER_S``."""
        self._hurried = True
        self._watch_answer()

    # --- the launcher's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the client, and start the timeout of the handshake."""
        self._transport = cast(asyncio.Transport, transport)
        if len(self._container.clients) >= CLIENTS_MAX:
            log.warning("closed a connection: there are already %d", CLIENTS_MAX)
            self._transport.abort()
            return
        self._container.clients.add(self)
        loop = asyncio.get_running_loop()
        self._handshake = loop.call_later(HANDSHAKE_TIMEOUT_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        """Parse bytes and pass on the requests that they complete."""
        if self._fault:
            return
        try:
            requests = self._parser.feed(data)
        except wire.FrameError as error:
            self._fault = str(error)
            requests = list(error.before)
        self._kept_back += requests
        self._ask_kept_back()

    def pause_writing(self) -> None:
        """Stop reading the sidecar's answers: the client does not read them."""
        if self._link is not None:
            self._link.pause()

    def resume_writing(self) -> None:
        """Read the sidecar's answers again: the client reads them."""
        if self._link is not None:
            self._link.resume()

    def connection_lost(self, exc: Optional[Exception]) -> None:
        """Tell the sidecar that the client is gone, now or when it is back."""
        self._gone = True
        self._container.clients.discard(self)
        if self._handshake is not None:
            self._handshake.cancel()
        self._watch_answer()
        if self._link is not None:
            self._say_farewell(self._link)
        elif self.relaying is not None and not self._is_wanted():
            self.relaying.cancel()
        if self._met >= 0 and self._clearing is None:
            self._clear()

    def _ask_kept_back(self) -> None:
        """Pass requests on, up to the first by which its torchrun is about to start workers."""
        while self._kept_back and self._clearing is None:
            number = round_begun_by(self._kept_back[0])
            if number is not None and number != self._met:
                self._met = number
                self._clear()
            else:
                self._ask(self._kept_back.popleft())
        self._regulate()

    def _clear(self) -> None:
        self._clearing = asyncio.ensure_future(self._container.clear())
        self._clearing.add_done_callback(self._on_cleared)

    def _on_cleared(self, clearing: asyncio.Task[None]) -> None:
        self._clearing = None
        if not clearing.cancelled() and clearing.exception() is not None:
            log.error(
                "a defect of muster-run: processes of ended worlds may be left",
                exc_info=clearing.exception(),
            )
        if not self._gone:
            self._ask_kept_back()
            self._watch_answer()

    def _ask(self, request: wire.Request) -> None:
        if isinstance(request, wire.CompareSet) and request.key.startswith(wire.STAGE):
            may_pass = b"" if self._container.took_part else wire.MAY_PASS
            request = request._replace(expected=may_pass)
        if isinstance(request, wire.Validate):
            if self._handshake is not None:
                self._handshake.cancel()
            self.relaying = asyncio.ensure_future(self._relay())
            self.relaying.add_done_callback(self._on_relaying_ended)
        elif isinstance(request, wire.Ping) and not self._ledger:
            self._transport.write(wire.pong(request.nonce))
        else:
            frame = self._ledger.add(request, connected=self.connected)
            if self._link is not None:
                self._link.send(frame)
            if self._overdue is None:
                self._watch_answer()

    def _watch_answer(self) -> None:
        """Restart the timeout of an answer that a client which has to end waits for."""
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
        awaited = self._ledger.awaited or self._clearing is not None
        if self._hurried and awaited and not self._gone:
            loop = asyncio.get_running_loop()
            self._overdue = loop.call_later(LAST_ANSWER_S, self._leave_unanswered)

    def _leave_unanswered(self) -> None:
        log.info(
            "a launcher that is told to end waits for an answer of the sidecar: its connection is"
            " closed, so that it handles the signal"
        )
        self.shut()

    def _regulate(self) -> None:
        """Pause, resume or close, depending on the requests that are not settled."""
        if self._gone:
            return
        if self._fault and not self._ledger.busy and not self._kept_back:
            log.warning("closed a connection to the rendezvous: %s", self._fault)
            self._transport.close()
            return
        clearing = self._clearing is not None
        pause = bool(self._fault) or self._ledger.held > HELD_MAX or clearing
        if pause != self._reading_paused:
            self._reading_paused = pause
            if pause:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    # --- the sidecar's side ---

    async def _relay(self) -> None:
        """Keep a connection to the sidecar until the client is gone and the sidecar knows it."""
        loop = asyncio.get_running_loop()
        pause_s = RETRY_MIN_S
        while self._is_wanted():
            sidecar = await self._socket_of_sidecar(listens=False)
            try:
                _, link = await loop.create_unix_connection(
                    lambda: Link(self), self._container.path
                )
            except OSError:
                link = None
            if link is not None:
                began_s = loop.time()
                self._link = link
                link.send(self._ledger.begin())
                self._say_farewell(link)
                await link.lost
                self._link = None
                if link.refused:
                    break
                # The farewell may have been written without a reader: only a sidecar that is still
                # there has closed the connection because it has read it.
                if link.finished and sidecar == await self._socket_of_sidecar(listens=True):
                    break
                if loop.time() - began_s > SETTLED_S:
                    pause_s = RETRY_MIN_S
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, RETRY_MAX_S)
        self.shut()

    async def _socket_of_sidecar(self, *, listens: bool) -> Tuple[int, int]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, socket_of, self._container.path, listens)

    def _on_relaying_ended(self, relaying: asyncio.Task[None]) -> None:
        if not relaying.cancelled() and relaying.exception() is not None:
            log.error(
                "a defect of muster-run closes a connection to the rendezvous",
                exc_info=relaying.exception(),
            )
            self.shut()

    def _is_wanted(self) -> bool:
        """Return whether a sidecar has to learn of this client."""
        return not self._gone or self._ledger.was_sent or self._ledger.owes

    def answered(self, number: int, answer: bytes) -> None:
        """Pass an answer on to the client; keep a note."""
        if number == wire.NOTE:
            self._ledger.note = answer
            self._container.took_part = True
            return
        out = self._ledger.settle(number, answer)
        self._watch_answer()
        if self._gone and self._link is not None:
            self._say_farewell(self._link)
        elif out:
            self._transport.write(out)
        if self._reading_paused:
            self._regulate()

    def _say_farewell(self, link: Link) -> None:
        """Tell the sidecar that the client is gone, once its unanswered writes are done."""
        if self._gone and not self._ledger.owes:
            link.finish()


class Link(asyncio.Protocol):
    """One connection to the sidecar."""

    def __init__(self, client: Client) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.refused = False
        self.finished = False
        """Whether the sidecar was sent the farewell of its client."""
        self._client = client
        self._answers = wire.AnswerParser()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take answers, notes and refusals from the sidecar."""
        try:
            answers = self._answers.feed(data)
        except wire.FrameError as error:
            log.warning("reconnecting to the sidecar: %s", error)
            self._transport.abort()
            return
        for number, answer in answers:
            if number == wire.REFUSAL:
                why = answer.decode(errors="replace") or "its log says why"
                log.warning("the sidecar closed the connection of a launcher: %s", why)
                self.refused = True
            else:
                self._client.answered(number, answer)

    def connection_lost(self, exc: Optional[Exception]) -> None:
        """Mark the connection as lost; the client waits for the next one."""
        if not self.lost.done():
            self.lost.set_result(None)

    def send(self, frames: bytes) -> None:
        """Send requests."""
        self._transport.write(frames)

    def finish(self) -> None:
        """End the stream. The sidecar closes the connection when it has read the end."""
        if not self.finished and not self._transport.is_closing():
            self.finished = True
            self._transport.resume_reading()
            self._transport.write_eof()

    def pause(self) -> None:
        """Stop reading answers for now."""
        self._transport.pause_reading()

    def resume(self) -> None:
        """Read answers again."""
        if not self._transport.is_closing():
            self._transport.resume_reading()
