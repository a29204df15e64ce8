# SPDX-License-Identifier: Apache-2.0
"""One client of the etcd3 package: whether its connection is up, and each watch as a ``WatchCall``.

The package's watcher opens a stream again at once, for ever, whenever one ends, drops the message
that a watch was cancelled, and cannot ask for a sign of life. So each watch has a watcher of its
own that ends with its stream, and whose stub is this: it passes every message on to the reader, and
to the package only that the watch was created. Most of this blocks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any

import grpc

from rdzv.store import etcd_pb2 as pb
from rdzv.store.access import Access
from rdzv.store.etcd.answers import StatusCode, StatusError, explained
from rdzv.store.etcd.endpoint import (
    STATUS,
    AnswerLostError,
    BusyError,
    Metadata,
    Method,
    NotSentError,
)
from rdzv.store.etcd3.calls import (
    Etcd3Client,
    Etcd3Exception,
    Watcher,
    WatchStub,
    caller_of,
    make_call,
    status_error,
)

_BROKEN = (
    StatusCode.UNAVAILABLE,
    StatusCode.DEADLINE_EXCEEDED,
    StatusCode.CANCELLED,
)
_CLOSED = "this client was closed"

_OPTIONS: tuple[tuple[str, int], ...] = (
    # A frozen peer is detected after 6 + 2 s. Without the HTTP/2 ping time-out it takes 66 s, and
    # etcd ends a connection that pings more often than every 5 s.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    # etcd allows no pings while no call is under way: the third one ends the connection, and grpc
    # doubles its period from then on. The next call finds out whether an idle connection still
    # works.
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    # The defaults back off to two minutes: far longer than a store takes to come back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # This bounds an attempt to connect: TCP, TLS and HTTP/2 take several round trips.
    ("grpc.min_reconnect_backoff_ms", 3000),
    # A ping with every message doubles what an idle watch costs, to tune windows that messages of
    # a few KB never fill.
    ("grpc.http2.bdp_probe", 0),
    # A pod's http_proxy is for the web, never for the store.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
)

UNREAD = 64
"""Bound on the messages that wait for the reader; beyond it the thread reads no more from the
network."""


class Etcd3Connection:
    """A connection, made with the first call; ``number`` differs from one to the next."""

    def __init__(self, target: str, access: Access, number: int) -> None:
        self._target = target
        self._access = access
        # grpc shares connections between channels of equal options, so these must differ.
        self._options = (*_OPTIONS, ("muster.connection", number))
        self._client: Any = None
        self._making = threading.Lock()
        self._ready = False
        self._closed = False
        self._closing = asyncio.Event()

    async def close(self, grace: float | None = None) -> None:
        """End the calls under way, after ``grace`` seconds or when closed again without it."""
        if grace is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._closing.wait()
        self._closing.set()
        self._closed = True
        if self._client is not None:
            # The client's own close does no more.
            await asyncio.to_thread(self._client.channel.close)

    @property
    def ready(self) -> bool:
        """Whether the connection is known to be up."""
        return self._ready

    # -- in threads

    def call(self, method: Method, request: Any, deadline_s: float, metadata: Metadata) -> Any:
        """Make one attempt; raise ``NotSentError``, ``AnswerLostError``, ``StatusError``.

        A connection that was lost unnoticed is made anew by the request itself. At its deadline it
        is then unknown whether it was sent, so a write counts as one that may have been applied.
        """
        if monotonic() >= deadline_s:
            raise BusyError("no thread was free in time")
        client = self.connected(deadline_s)
        left_s = deadline_s - monotonic()
        if left_s <= 0:
            raise NotSentError("connecting took all the time there was")
        try:
            return make_call(client, method, request, left_s, metadata)
        except StatusError as error:
            if self._closed:
                raise AnswerLostError(_CLOSED) from None
            if error.code in _BROKEN:
                self._ready = False
            raise
        except ValueError:
            # grpc raises this for a channel that was closed a moment ago.
            if not self._closed:
                raise
            raise NotSentError(_CLOSED) from None

    def connected(self, deadline_s: float) -> Any:
        """Return the client once its connection is up; raise ``NotSentError`` if it is late."""
        if self._ready:
            return self._client
        if not self._making.acquire(timeout=max(deadline_s - monotonic(), 0)):
            raise NotSentError("no connection yet")
        try:
            if not self._ready:
                self._make_client()
                self._ask(max(deadline_s - monotonic(), 0.001))
                self._ready = True
        finally:
            self._making.release()
        return self._client

    def _make_client(self) -> None:
        if self._client is not None:
            return
        access = self._access
        files = {}
        if access.tls:
            files = {
                "ca_cert": access.cacert,
                "cert_cert": access.cert or None,
                "cert_key": access.key or None,
            }
        host, _, port = self._target.rpartition(":")
        try:
            client = Etcd3Client(host, port, **files, grpc_options=self._options)
        except OSError as error:
            # The files were there a moment ago: they are being replaced.
            raise NotSentError(str(error)) from None
        if self._closed:
            client.channel.close()
        self._client = client

    def _ask(self, timeout_s: float) -> None:
        """Wait for any answer of the member, even that it requires authentication.

        So a request that ends at its deadline was certainly sent, and one that was not sent is
        known.
        """
        try:
            make_call(self._client, STATUS, pb.StatusRequest(), timeout_s, ())
        except StatusError as error:
            if error.code in _BROKEN:
                why = _CLOSED if self._closed else explained(str(error))
                raise NotSentError(why) from None
        except ValueError:
            if not self._closed:
                raise
            raise NotSentError(_CLOSED) from None


Run = Callable[[Callable[[], None], float], Awaitable[None]]


class _StreamOverError(Exception):
    """The signal that ends the thread of a watcher."""


class _OneStream(Watcher):  # type: ignore[misc]
    """A watcher that ends with its first stream."""

    def _run(self) -> None:
        with suppress(_StreamOverError):
            super()._run()


class Etcd3Watch:
    """The stream. ``run`` runs what blocks, and for how long, in a thread.

    It must be created within ``create_s`` seconds.
    """

    def __init__(
        self, connection: Etcd3Connection, run: Run, metadata: Metadata, create_s: float
    ) -> None:
        self._create_s = create_s
        self._connection = connection
        self._metadata = metadata
        self._run = run
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._room = threading.Semaphore(UNREAD)
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._channel: Any = None
        self._call: Any = None
        self._over = False

    async def write(self, request: Any) -> None:
        """Send a request; raise ``StatusError`` if the stream is over."""
        if self._over:
            raise _lost("the watch is over")
        if not request.HasField("create_request"):
            self._requests.put(request)
            return
        deadline_s = monotonic() + self._create_s
        create = partial(self._create, request.create_request, deadline_s)
        try:
            await self._run(create, self._create_s)
        except (NotSentError, AnswerLostError) as error:
            self._end(_lost(str(error)))
        except StatusError as error:
            self._end(error)
        else:
            return
        raise _lost("the watch could not be created")

    async def read(self) -> Any:
        """Wait for a message; return None once cancelled, or raise ``StatusError``."""
        message = await self._messages.get()
        if message is None or isinstance(message, Exception):
            self._messages.put_nowait(message)
        if isinstance(message, Exception):
            raise message
        self._room.release()
        return message

    def cancel(self) -> None:
        """End the stream."""
        self._end(None)

    def _end(self, last: Any) -> None:
        self._over = True
        self._room.release()
        self._messages.put_nowait(last)
        self._requests.put(None)
        if self._call is not None:
            self._call.cancel()

    # -- in threads

    def _create(self, create: pb.WatchCreateRequest, deadline_s: float) -> None:
        connected = self._connection.connected(deadline_s)
        left_s = max(deadline_s - monotonic(), 0.001)
        creator = caller_of(connected, left_s, self._metadata)
        creator.watcher = _OneStream(self, timeout=left_s, metadata=self._metadata)
        self._channel = connected.channel
        try:
            creator.add_watch_callback(
                create.key,
                _ignore,
                range_end=create.range_end or None,
                start_revision=create.start_revision,
            )
        except (grpc.RpcError, Etcd3Exception) as error:
            raise status_error(error) from None

    def Watch(  # noqa: N802
        self, requests: Iterator[Any], *, credentials: Any, metadata: Any
    ) -> Iterator[Any]:
        """Open the one stream; a later call by the package's watcher ends its thread."""
        if self._call is not None or self._over:
            raise _StreamOverError
        try:
            self._call = WatchStub(self._channel).Watch(
                self._all_requests(requests), credentials=credentials, metadata=metadata
            )
        except ValueError as closed:
            # grpc raises this for a channel that was closed a moment ago.
            self._tell(None)
            raise _StreamOverError from closed
        if self._over:
            self._call.cancel()
        return self._created()

    def _all_requests(self, requests: Iterator[Any]) -> Iterator[Any]:
        """Yield the package's one request, then Muster's."""
        yield next(requests)
        while (request := self._requests.get()) is not None:
            yield request

    def _created(self) -> Iterator[Any]:
        """Pass all messages to the reader, and to the package only that the watch was created."""
        try:
            for message in self._call:
                if not self._over:
                    self._room.acquire()
                self._tell(message)
                if message.created:
                    yield message
        except grpc.RpcError as error:
            self._tell(status_error(error))
            raise
        else:
            self._tell(None)
        finally:
            self._requests.put(None)

    def _tell(self, message: Any) -> None:
        # A loop that is closed has no reader left.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._messages.put_nowait, message)


def _lost(why: str) -> StatusError:
    return StatusError(StatusCode.UNAVAILABLE, why)


def _ignore(response: Any) -> None:
    """Ignore an event, which the reader gets another way."""
