# SPDX-License-Identifier: Apache-2.0
"""Health, readiness and metrics over HTTP, on the member's own address; the lag that health shows.

``/healthz`` says that the event loop keeps time and nothing else: a store that is away must never
get a sidecar killed. ``/readyz`` says that launchers beside it can start.

Three pages for kubelet and Prometheus need no web framework, which would be a sixth of the
sidecar's memory: one bounded GET a connection, answered and closed.

Other sidecars of the job hold an idle connection here, by a page of their own that is never ended:
its first lines are the whole answer. Neither side sends anything after that.

Any client on the pod network can connect, and hold connections that never send a request. So a new
connection is never refused: if there are too many, the oldest one of the address with the most
connections is aborted. Of those that are held as another sidecar's, the oldest is closed; the
sidecar opens another one.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

from agent.config import Config
from agent.neighbour import keep_alive, path_of
from agent.telemetry.metrics import CONTENT_TYPE, Metrics
from rdzv.dataclass import dataclass
from rdzv.errors import ConfigError
from rdzv.reconcile import Loop, Outlook
from rdzv.sentences import named

log = logging.getLogger(__name__)

PROBE_INTERVAL_S = 1.0
REMEMBERED = 10
"""Probes that ``worst_s`` looks back on."""

LOGGED_S = 1.0
"""Lag above which a warning is logged, in seconds: a third of the usual renewal interval."""

UNHEALTHY_LAG_S = 30.0
"""Lag above which the sidecar is unhealthy, in seconds: far more than the default lease TTL.
Something inside hangs, and a restart can cure it."""

REQUEST_TIMEOUT_S = 5.0
"""Time limit for a whole request, and again for sending its answer, in seconds."""

REQUEST_MAX = 8192

BACKLOG = 100
"""Connections that the kernel queues, and that one turn of the event loop accepts."""

HELD_MAX = 32
"""Bound on connections of other sidecars: three hold one at a time, and a few more while members
come and go."""

HELD_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 20, socket.TCP_KEEPCNT: 3}
"""Options of such a connection, in seconds: without them, one whose peer's machine is gone would
stay for ever. A peer that lives is never asked: its own packets come more often."""

CONNECTIONS_MAX = 2 * BACKLOG
"""Bound on open connections: some 2 MiB if all are held open. A request comes right after its
connection: no turn of the loop accepts so many that one is aborted before its request is read."""


class LoopLag(Loop):
    """The time by which sleeps of ``PROBE_INTERVAL_S`` are too long; ``clock`` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._lags: deque[float] = deque([0.0], maxlen=REMEMBERED)
        self._due_s: float | None = None

    @property
    def worst_s(self) -> float:
        """The worst lag of the last probes, in seconds."""
        return max(self._lags)

    async def step(self) -> Outlook:
        """Measure by how much this look is too late."""
        lag_s = 0.0 if self._due_s is None else max(0.0, self.clock() - self._due_s)
        self._lags.append(lag_s)
        if lag_s > LOGGED_S:
            log.warning(
                "the event loop was blocked for %.1f s: the lease may expire, and others may"
                " count this member as lost",
                lag_s,
                extra={"event": "loop_lag", "lag_s": round(lag_s, 3)},
            )
        self._due_s = self.clock() + PROBE_INTERVAL_S
        return Outlook(look_at_s=self._due_s)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """One HTTP response."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"

    def render(self, *, with_body: bool = True) -> bytes:
        """Encode the response for the wire; without its body for a HEAD request."""
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
            f"Content-Type: {self.content_type}\r\nContent-Length: {len(self.body)}\r\n"
            "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
        )
        return head.encode("ascii") + (self.body if with_body else b"")


def error_page(status: HTTPStatus) -> HttpAnswer:
    """Build a page that says no more than its status."""
    return HttpAnswer(status, f"{status.phrase}\n".encode())


@asynccontextmanager
async def serving(
    config: Config, loop_lag: LoopLag, not_ready: Callable[[], str | None], metrics: Metrics
) -> AsyncIterator[None]:
    """Serve until the block ends; ``not_ready`` returns why the member is not ready, or None.

    Raises ``ConfigError`` if the address and port cannot be listened on.
    """

    def healthz() -> HttpAnswer:
        late_s = loop_lag.worst_s
        if late_s > UNHEALTHY_LAG_S:
            text = f"the event loop was {late_s:.0f} s late\n"
            return HttpAnswer(HTTPStatus.SERVICE_UNAVAILABLE, text.encode())
        return HttpAnswer(HTTPStatus.OK, b"healthy\n")

    def readyz() -> HttpAnswer:
        reason = not_ready()
        if reason is not None:
            return HttpAnswer(HTTPStatus.SERVICE_UNAVAILABLE, f"{reason}\n".encode())
        return HttpAnswer(HTTPStatus.OK, b"ready\n")

    def metricsz() -> HttpAnswer:
        return HttpAnswer(HTTPStatus.OK, metrics.text(), CONTENT_TYPE)

    pages = {b"/healthz": healthz, b"/readyz": readyz, b"/metrics": metricsz}
    clients = _Clients(pages, path_of(config.member))
    try:
        server = await asyncio.start_server(
            clients.answer,
            config.address,
            config.http_port,
            limit=REQUEST_MAX,
            backlog=BACKLOG,
        )
    except OSError as error:
        raise _cannot_listen(config, error) from error
    try:
        yield
    finally:
        server.close()
        await clients.drop()


class _Clients:
    """The open connections; each is answered from a table of pages by path.

    ``peer``: the path of the page that other sidecars hold.
    """

    def __init__(self, pages: Mapping[bytes, Callable[[], HttpAnswer]], peer: bytes) -> None:
        self._pages = pages
        self._peer = peer
        # The oldest first.
        self._held: dict[asyncio.StreamWriter, asyncio.Task[object]] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        # The oldest first.
        self._addresses: dict[asyncio.StreamWriter, str] = {}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection and close it."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._admit(writer)
        try:
            # A client that is slow, disconnects or sends no HTTP gets the answer that is possible,
            # and no second chance.
            with suppress(TimeoutError, ConnectionError):
                request = await self._request(reader)
                if _target(request) == self._peer:
                    await self._hold(reader, writer, task)
                    return
                writer.write(self._page(request).render(with_body=request[:5] != b"HEAD "))
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    await writer.drain()
        finally:
            self._tasks.discard(task)
            self._addresses.pop(writer, None)
            self._held.pop(writer, None)
            writer.close()

    async def drop(self) -> None:
        """Cancel every connection, and wait for its end."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _admit(self, writer: asyncio.StreamWriter) -> None:
        """Admit a connection; abort another one if there are too many."""
        peer = writer.get_extra_info("peername")
        self._addresses[writer] = str(peer[0]) if peer else ""
        if len(self._addresses) <= CONNECTIONS_MAX:
            return
        greediest, _ = Counter(self._addresses.values()).most_common(1)[0]
        oldest = next(one for one, address in self._addresses.items() if address == greediest)
        del self._addresses[oldest]
        oldest.transport.abort()

    async def _request(self, reader: asyncio.StreamReader) -> bytes:
        """Read the request up to its empty line; return nothing if none is within the bounds."""
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                return await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return b""

    async def _hold(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[object]
    ) -> None:
        """Begin the answer to another sidecar, and wait until it closes the connection."""
        while len(self._held) >= HELD_MAX:
            self._held.pop(next(iter(self._held))).cancel()
        self._held[writer] = task
        with suppress(OSError):
            keep_alive(writer, HELD_KEEP_ALIVE)
            writer.write(b"HTTP/1.1 200 OK\r\nCache-Control: no-store\r\n\r\n")
            await reader.read(1)

    def _page(self, request: bytes) -> HttpAnswer:
        match request.partition(b"\r\n")[0].split(b" "):
            case [b"GET" | b"HEAD", target, b"HTTP/1.0" | b"HTTP/1.1"]:
                page = self._pages.get(target.partition(b"?")[0])
                return error_page(HTTPStatus.NOT_FOUND) if page is None else page()
            case [_, _, b"HTTP/1.0" | b"HTTP/1.1"]:
                return error_page(HTTPStatus.METHOD_NOT_ALLOWED)
        return error_page(HTTPStatus.BAD_REQUEST)


def _target(request: bytes) -> bytes:
    """Return the path that a GET asks for; empty for anything else."""
    match request.partition(b"\r\n")[0].split(b" "):
        case [b"GET", target, b"HTTP/1.1"]:
            return target
    return b""


def _cannot_listen(config: Config, error: OSError) -> ConfigError:
    where = f"{config.address} port {config.http_port}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"{named('--http-port')}: {where} is taken by another process: give another one"
        )
    return ConfigError(
        f"{named('--address')}: {where} cannot be listened on ({error.strerror}):"
        " give an address of this pod"
    )
