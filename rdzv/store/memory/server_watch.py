# SPDX-License-Identifier: Apache-2.0
"""The embedded server's watch: any number of watchers on one stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from google.protobuf.message import DecodeError

from rdzv.errors import Compacted
from rdzv.store.etcd.errors import StatusCode
from rdzv.store.interface import WatchEvent
from rdzv.store.intervals import Interval
from rdzv.store.memory.engine import MemoryEngine, Watcher
from rdzv.store.memory.served_connection import ServedCall
from rdzv.store.memory.server_calls import put_message
from rdzv.store.pb import etcd_pb2 as pb

log = logging.getLogger(__name__)

EVENTS_PER_MESSAGE = 1000
"""Events at which a message ends; it has whole revisions, so that it may have more."""

_KINDS = {"put": pb.Event.PUT, "delete": pb.Event.DELETE}


class ServedWatch:
    """The ``Service`` of one stream of watches, until the client ends it."""

    def __init__(
        self, call: ServedCall, engine: MemoryEngine, header: Callable[[], pb.ResponseHeader]
    ) -> None:
        self._call = call
        self._stream = _Stream(engine, header)
        self._sending = asyncio.create_task(self._send(), name="watch answers")

    def take(self, message: bytes) -> None:
        """Take a request."""
        try:
            self._stream.receive(pb.WatchRequest.FromString(message))
        except DecodeError as error:
            self._call.finish(StatusCode.INTERNAL, f"the request cannot be read: {error}")

    def end(self) -> None:
        """Note that the client makes no more requests."""
        self._stream.end()

    def close(self) -> None:
        """Close every watcher."""
        self._stream.close()
        self._sending.cancel()

    async def _send(self) -> None:
        try:
            while await self._stream.news():
                for response in self._stream.responses():
                    await self._call.write(response.SerializeToString())
        except Exception as error:
            log.exception("a watch failed in the embedded store")
            self._stream.close()
            self._call.finish(StatusCode.UNKNOWN, repr(error))
        else:
            self._call.finish(StatusCode.OK)


class _Stream:
    def __init__(self, engine: MemoryEngine, header: Callable[[], pb.ResponseHeader]) -> None:
        self._engine = engine
        self._header = header
        self._watchers: dict[int, Watcher] = {}
        self._ids = count()
        self._replies: list[pb.WatchResponse] = []
        self._progress_wanted = False
        self._wake = asyncio.Event()
        self._ended = False

    async def news(self) -> bool:
        """Wait until there is something to send; return False at the end of the stream."""
        await self._wake.wait()
        self._wake.clear()
        return not self._ended

    def end(self) -> None:
        """Note that the client makes no more requests."""
        self._ended = True
        self._wake.set()

    def close(self) -> None:
        """Close every watcher."""
        for watcher in self._watchers.values():
            watcher.close()

    def receive(self, request: pb.WatchRequest) -> None:
        """Process one request."""
        match request.WhichOneof("request_union"):
            case "create_request":
                self._create(request.create_request)
            case "cancel_request":
                self._cancel(request.cancel_request.watch_id)
            case "progress_request":
                self._progress_wanted = True
        self._wake.set()

    def responses(self) -> Iterator[pb.WatchResponse]:
        """Yield what is to be sent now, in order."""
        replies, self._replies = self._replies, []
        progress_wanted, self._progress_wanted = self._progress_wanted, False
        yield from replies
        for watch_id, watcher in tuple(self._watchers.items()):
            try:
                _, events = watcher.take()
            except Compacted as gone:
                self._drop(watch_id)
                yield pb.WatchResponse(
                    header=self._header(),
                    watch_id=watch_id,
                    canceled=True,
                    compact_revision=gone.compact_revision,
                )
                continue
            yield from self._events(watch_id, events)
        if progress_wanted and not self._wake.is_set():
            yield pb.WatchResponse(header=self._header(), watch_id=-1)
        elif progress_wanted:
            # Events came while this was being sent: they go first.
            self._progress_wanted = True

    def _create(self, request: pb.WatchCreateRequest) -> None:
        watch_id = request.watch_id or next(
            number for number in self._ids if number not in self._watchers
        )
        if request.prev_kv or watch_id in self._watchers:
            self._replies.append(
                pb.WatchResponse(
                    header=self._header(),
                    watch_id=watch_id,
                    created=True,
                    canceled=True,
                    cancel_reason="the embedded store has no previous values in watches"
                    if request.prev_kv
                    else "etcdserver: duplicate watch ID",
                )
            )
            return
        start = request.start_revision or self._engine.revision + 1
        interval = Interval(request.key, request.range_end)
        self._watchers[watch_id] = self._engine.watch(interval, start, self._wake.set)
        self._replies.append(
            pb.WatchResponse(header=self._header(), watch_id=watch_id, created=True)
        )

    def _cancel(self, watch_id: int) -> None:
        if watch_id in self._watchers:
            self._drop(watch_id)
            self._replies.append(
                pb.WatchResponse(header=self._header(), watch_id=watch_id, canceled=True)
            )

    def _drop(self, watch_id: int) -> None:
        self._watchers.pop(watch_id).close()

    def _events(self, watch_id: int, events: Sequence[WatchEvent]) -> Iterator[pb.WatchResponse]:
        start = 0
        while start < len(events):
            end = min(start + EVENTS_PER_MESSAGE, len(events))
            while end < len(events) and _revision(events[end]) == _revision(events[end - 1]):
                end += 1
            yield pb.WatchResponse(
                header=self._header(),
                watch_id=watch_id,
                events=[
                    pb.Event(type=_KINDS[event.kind], kv=put_message(event.kv))
                    for event in events[start:end]
                ],
            )
            start = end


def _revision(event: WatchEvent) -> int:
    return event.kv.mod_revision
