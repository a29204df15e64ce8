# SPDX-License-Identifier: Apache-2.0
"""One watch that the etcd3 package opens, as a ``WatchCall``.

The package's watcher opens a stream again at once, for ever, whenever one ends, drops the message
that a watch was cancelled, and cannot ask for a sign of life. So each watch has a watcher of its
own that ends with its stream, and whose stub is this: it passes every message on to the reader, and
to the package only that the watch was created.
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

from rdzv.store.etcd.endpoint import AnswerLostError, Metadata, NotSentError
from rdzv.store.etcd.errors import StatusCode, StatusError
from rdzv.store.etcd3.calls import caller_of, status_error
from rdzv.store.etcd3.connection import Etcd3Connection
from rdzv.store.etcd3.package import Etcd3Exception, Watcher, WatchStub
from rdzv.store.pb import etcd_pb2 as pb

UNREAD = 64
"""Bound on the messages that wait for the reader; beyond it the thread reads no more from the
network."""

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
