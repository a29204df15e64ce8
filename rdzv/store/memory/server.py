# SPDX-License-Identifier: Apache-2.0
"""The memory engine, served over etcd's own v3 gRPC API; any number of watchers on one stream.

For laptops and tests: everything goes through the production driver, and ``etcdctl`` works on it.
It keeps nothing across a restart; clients notice that by its cluster id.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from types import TracebackType
from typing import Any, Self

from google.protobuf.message import DecodeError

from rdzv.errors import Compacted, ConfigError
from rdzv.store import etcd_pb2 as pb
from rdzv.store.access import target_of
from rdzv.store.etcd.answers import StatusCode
from rdzv.store.interface import Interval, WatchEvent
from rdzv.store.memory.engine import MemoryEngine, Watcher
from rdzv.store.memory.served_connection import ServedCall, ServedConnection, Service, Services
from rdzv.store.memory.server_calls import Answering, ServedCalls, put_message

log = logging.getLogger(__name__)

EVENTS_PER_MESSAGE = 1000
"""Events at which a message ends; it has whole revisions, so that it may have more."""

_KINDS = {"put": pb.Event.PUT, "delete": pb.Event.DELETE}

MAX_EXPIRY_WAIT_S = 0.5
"""Longest wait before the leases are checked again, in seconds, as one may be granted meanwhile."""


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


class EmbeddedServer:
    """An etcd-like server: ``async with EmbeddedServer() as server: … server.endpoint``.

    ``listen`` is ``host:port``; port 0 takes a free one. Raises ``ConfigError`` if it is taken, or
    cannot be listened on.
    """

    def __init__(self, listen: str = "127.0.0.1:0", *, engine: MemoryEngine | None = None) -> None:
        self.engine = MemoryEngine(cluster_id=secrets.randbits(63)) if engine is None else engine
        self._listen = target_of(listen, "--listen")
        self.endpoint = self._listen

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        host, _, port = self._listen.rpartition(":")
        services = _services(self.engine)
        self._connections: set[ServedConnection] = set()
        try:
            self._server = await loop.create_server(
                lambda: ServedConnection(services, self._connections), host.strip("[]"), int(port)
            )
        except (OSError, OverflowError) as error:
            why = _why_not(error, host, port)
            raise ConfigError(f"cannot listen on {self._listen}: {why}") from error
        self.endpoint = f"{host}:{self._server.sockets[0].getsockname()[1]}"
        self._expiry = asyncio.create_task(self._expire(), name="lease expiry")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._expiry.cancel()
        await asyncio.wait({self._expiry})
        self._server.close()
        for connection in tuple(self._connections):
            connection.end()
        await self._server.wait_closed()

    async def _expire(self) -> None:
        engine = self.engine
        while True:
            engine.expire_leases()
            left_s = engine.leases.next_deadline_s() - engine.clock()
            await asyncio.sleep(min(max(left_s, 0.01), MAX_EXPIRY_WAIT_S))


def _why_not(error: OSError | OverflowError, host: str, port: str) -> str:
    """Return the reason, and what to do."""
    if isinstance(error, OverflowError):
        return f"there is no port {port}: choose one up to 65535 with --listen"
    if isinstance(error, socket.gaierror):
        return f"the name {host} is not known here: give an address of this machine with --listen"
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} is taken by another process: choose another with --listen"
        case errno.EADDRNOTAVAIL:
            return f"this machine has no address {host}: give one of its own with --listen"
        case errno.EACCES:
            return f"port {port} is for root alone: choose one from 1024 on with --listen"
    return f"{error.strerror}: choose another address with --listen"


def _services(engine: MemoryEngine) -> Services:
    calls = ServedCalls(engine)

    def answering(answer: Callable[[Any], Any], request: Any) -> Callable[[ServedCall], Answering]:
        return lambda call: Answering(call, request, answer)

    services: dict[str, Callable[[ServedCall], Service]] = {
        "Auth/AuthStatus": answering(calls.auth_status, pb.AuthStatusRequest),
        "KV/Range": answering(calls.range, pb.RangeRequest),
        "KV/Put": answering(calls.put, pb.PutRequest),
        "KV/DeleteRange": answering(calls.delete_range, pb.DeleteRangeRequest),
        "KV/Txn": answering(calls.txn, pb.TxnRequest),
        "KV/Compact": answering(calls.compact, pb.CompactionRequest),
        "Lease/LeaseGrant": answering(calls.lease_grant, pb.LeaseGrantRequest),
        "Lease/LeaseRevoke": answering(calls.lease_revoke, pb.LeaseRevokeRequest),
        "Lease/LeaseKeepAlive": answering(calls.lease_keep_alive, pb.LeaseKeepAliveRequest),
        "Lease/LeaseTimeToLive": answering(calls.lease_time_to_live, pb.LeaseTimeToLiveRequest),
        "Lease/LeaseLeases": answering(calls.lease_leases, pb.LeaseLeasesRequest),
        "Maintenance/Status": answering(calls.status, pb.StatusRequest),
        "Maintenance/Alarm": answering(calls.alarm, pb.AlarmRequest),
        "Watch/Watch": lambda call: ServedWatch(call, engine, calls.header),
    }
    return {f"/etcdserverpb.{name}".encode(): service for name, service in services.items()}
