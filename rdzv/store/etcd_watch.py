# SPDX-License-Identifier: Apache-2.0
"""One watch stream of etcd: from messages to batches, and how it finds out that it is dead."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import grpc.aio

from rdzv.errors import Compacted, StoreRefused
from rdzv.store.endpoints import Endpoint, Metadata
from rdzv.store.interface import WATCH_PROGRESS_S, WatchBatch, WatchEvent
from rdzv.store.intervals import Interval
from rdzv.store.messages import watch_events
from rdzv.store.patience import ATTEMPT_S
from rdzv.store.pb import etcd_pb2 as pb
from rdzv.store.taxonomy import explained

ASK_S = 0.9 * WATCH_PROGRESS_S
"""After this long without a message the stream asks for a sign of life."""

SILENT_S = 3.0
"""A stream without any message for this long is dead, or a little longer where the line is slow.
The transport alone would take 8 s to see that a peer is frozen, and never sees a member that
answers pings but has no leader to hear from."""

_REFUSALS = (
    "permission denied",
    "invalid auth token",
    "revision of auth store is old",
    "user name is empty",
)


class StreamLostError(Exception):
    """The stream ended; the watch goes on elsewhere."""


class WatchStream:
    """A watch on one endpoint, used as an async context manager around ``next_batch``."""

    def __init__(
        self,
        endpoint: Endpoint,
        interval: Interval,
        start_revision: int,
        store_revision: int,
        metadata: Metadata,
    ) -> None:
        self.next_revision = start_revision
        self._start_revision = start_revision
        self._endpoint = endpoint
        self._metadata = metadata
        self._create = pb.WatchCreateRequest(
            key=interval.start,
            range_end=interval.end,
            # etcd answers no progress request of a watch that starts in the future, so on an idle
            # store the last revision is watched again, and dropped.
            start_revision=max(min(start_revision, store_revision), 1),
            fragment=True,
        )
        self._lost = ""
        self._waiting_since_s: float | None = None
        self._pieces: list[WatchEvent] = []

    async def __aenter__(self) -> Self:
        self._call: grpc.aio.StreamStreamCall = self._endpoint.open_watch(
            self.abandon, self._metadata
        )
        self._pulse = asyncio.create_task(self._keep_asking(), name="watch pulse")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._endpoint.forget_watch(self.abandon)
        self._pulse.cancel()
        self._call.cancel()
        await asyncio.wait({self._pulse})

    def abandon(self, reason: str) -> None:
        """End the stream from outside; ``next_batch`` then raises ``StreamLostError``."""
        if not self._lost:
            self._lost = reason
            self._call.cancel()

    async def next_batch(self) -> WatchBatch:
        """Wait for news or a sign of life.

        Raises ``StreamLostError``, ``Compacted`` and ``StoreRefused``.
        """
        while True:
            message = await self._read()
            if message.canceled:
                raise self._end_of(message)
            if message.created:
                continue
            if message.events:
                self._pieces += watch_events(message.events)
                if not message.fragment:
                    return self._batch()
            elif not self._pieces:
                # By which etcd says that all before it has been sent.
                revision = max(message.header.revision, self.next_revision - 1)
                self.next_revision = revision + 1
                return WatchBatch(revision, ())

    def _batch(self) -> WatchBatch:
        pieces, self._pieces = self._pieces, []
        # Those before it were delivered by an earlier stream.
        events = tuple(event for event in pieces if event.kv.mod_revision >= self._start_revision)
        if events and events[0].kv.mod_revision < self.next_revision:
            # etcd up to 3.4.24 and 3.5.7 answers a request for progress ahead of its events.
            late = events[0].kv.mod_revision
            raise Compacted(
                f"events of revision {late} came after those up to {self.next_revision - 1} had all"
                " been sent by the server's own word (etcd#15220)",
                late,
            )
        if events:
            # Not the header's revision: while it catches up, etcd sends its present one there.
            self.next_revision = events[-1].kv.mod_revision + 1
        return WatchBatch(self.next_revision - 1, events)

    def _end_of(self, message: Any) -> Exception:
        if message.compact_revision:
            return Compacted(
                f"the history from revision {self.next_revision} on was compacted at "
                f"{message.compact_revision}",
                message.compact_revision,
            )
        if any(refusal in message.cancel_reason for refusal in _REFUSALS):
            return StoreRefused(f"watch: {explained(message.cancel_reason)}")
        return StreamLostError(message.cancel_reason or "cancelled by the server")

    async def _read(self) -> Any:
        task = asyncio.current_task()
        cancelling = task.cancelling() if task else 0
        self._waiting_since_s = asyncio.get_running_loop().time()
        try:
            message = await self._call.read()
        except asyncio.CancelledError:
            # A cancelled call looks like a cancelled task; only the latter is passed on.
            if not self._lost or (task and task.cancelling() > cancelling):
                raise
            raise StreamLostError(self._lost) from None
        except grpc.aio.AioRpcError as error:
            raise StreamLostError(error.details() or str(error.code())) from None
        finally:
            self._waiting_since_s = None
        if message is grpc.aio.EOF:
            raise StreamLostError(self._lost or "ended by the server")
        return message

    async def _keep_asking(self) -> None:
        """Create the watch, then ask for progress whenever the reader has waited for a while."""
        loop = asyncio.get_running_loop()
        progress = pb.WatchRequest(progress_request=pb.WatchProgressRequest())
        try:
            await self._call.write(pb.WatchRequest(create_request=self._create))
            asked_at_s = loop.time()
            while True:
                waiting_since_s = self._waiting_since_s
                now = loop.time()
                if waiting_since_s is None:
                    waiting_since_s = now
                silent_s = SILENT_S + self._endpoint.patience.attempt_s - ATTEMPT_S
                if now - waiting_since_s >= silent_s:
                    self.abandon(f"silent for {now - waiting_since_s:.1f} s")
                    return
                ask_at_s = max(waiting_since_s, asked_at_s) + ASK_S
                if now >= ask_at_s:
                    asked_at_s = now
                    await self._call.write(progress)
                else:
                    await asyncio.sleep(min(ask_at_s, waiting_since_s + silent_s) - now)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The call is over; its reader learns why.
            return
