# SPDX-License-Identifier: Apache-2.0
"""One watch stream of etcd: turns messages into batches, and detects when it is dead."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rdzv.errors import Compacted, StoreRefused
from rdzv.pacing import ATTEMPT_S
from rdzv.store import etcd_pb2 as pb
from rdzv.store.etcd.answers import StatusError, explained, watch_events
from rdzv.store.etcd.endpoint import EtcdEndpoint, Metadata, WatchCall
from rdzv.store.interface import WATCH_PROGRESS_S, Interval, WatchBatch, WatchEvent

ASK_S = 0.9 * WATCH_PROGRESS_S
"""Time without a message after which the stream asks for a sign of life, in seconds."""

SILENT_S = 3.0
"""Time without any message after which a stream is dead, in seconds, or a little longer on a slow
connection. The transport alone would take 8 s to detect a frozen peer, and never detects a member
that answers pings but has no leader to hear from."""

BUSY_REVISIONS, BUSY_S = 32, 0.5
"""A stream that delivers so many revisions in this time is busy. etcd sends each in a message of
its own, and a new stream that begins before the present gets all up to then in one."""

_REFUSALS = (
    "permission denied",
    "invalid auth token",
    "revision of auth store is old",
    "user name is empty",
)


class StreamLostError(Exception):
    """The stream ended; the watch goes on elsewhere."""


@dataclass(slots=True)
class WatchCursor:
    """The position of a watch, over all its streams, in revisions.

    ``told``: the caller was told that everything up to here has been delivered. ``certain``: it has
    been; a new stream resumes after it (docs/decisions/store-driver.md).
    """

    told: int
    certain: int


class WatchStream:
    """A watch on one endpoint, used as an async context manager around ``next_batch``.

    It resumes at ``cursor``, and moves it. ``store_revision``: that of the store, read before.
    ``progress_is_certain``: the server reports progress only after the events.
    """

    def __init__(
        self,
        endpoint: EtcdEndpoint,
        interval: Interval,
        cursor: WatchCursor,
        store_revision: int,
        metadata: Metadata,
        *,
        progress_is_certain: bool,
    ) -> None:
        self._cursor = cursor
        self._start_revision = cursor.certain + 1
        self._progress_is_certain = progress_is_certain
        self._endpoint = endpoint
        self._metadata = metadata
        self._create = pb.WatchCreateRequest(
            key=interval.start,
            range_end=interval.end,
            # etcd answers no progress request of a watch that starts in the future, so on an idle
            # store the last revision is watched again, and its events are dropped.
            start_revision=max(min(self._start_revision, store_revision), 1),
            fragment=True,
        )
        self._lost = ""
        self._waiting_since_s: float | None = None
        self._pieces: list[WatchEvent] = []
        self._revisions = 0
        self._counted_since_s = asyncio.get_running_loop().time()

    @property
    def busy(self) -> bool:
        """Whether a reader that can wait reads less by a new stream."""
        return self._revisions >= BUSY_REVISIONS

    async def __aenter__(self) -> Self:
        self._call: WatchCall = self._endpoint.open_watch(self.abandon, self._metadata)
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
        """Wait for events or a sign of life.

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
                return self._progress(message.header.revision)

    def _progress(self, revision: int) -> WatchBatch:
        """Take the server's report that everything up to ``revision`` has been sent."""
        cursor = self._cursor
        cursor.told = max(cursor.told, revision)
        if self._progress_is_certain:
            cursor.certain = max(cursor.certain, revision)
        return WatchBatch(cursor.told, ())

    def _batch(self) -> WatchBatch:
        cursor = self._cursor
        pieces, self._pieces = self._pieces, []
        # Earlier events were delivered by an earlier stream.
        events = tuple(event for event in pieces if event.kv.mod_revision >= self._start_revision)
        if events and (late := events[0].kv.mod_revision) <= cursor.told:
            # etcd up to 3.4.24 and 3.5.7 answers a request for progress ahead of its events.
            raise Compacted(
                f"events of revision {late} arrived after the server had reported progress up to"
                f" {cursor.told} (etcd#15220)",
                late,
            )
        if events:
            # Not the header's revision: while the watch catches up, etcd sends its present one
            # there. Events of an interval come in order, so that all before these have come as
            # well.
            cursor.told = cursor.certain = events[-1].kv.mod_revision
            now = asyncio.get_running_loop().time()
            if now - self._counted_since_s > BUSY_S:
                self._counted_since_s, self._revisions = now, 0
            self._revisions += len({event.kv.mod_revision for event in events})
        return WatchBatch(cursor.told, events)

    def _end_of(self, message: Any) -> Exception:
        if message.compact_revision:
            return Compacted(
                f"the history from revision {self._cursor.certain + 1} on was compacted at "
                f"{message.compact_revision}",
                message.compact_revision,
            )
        if any(refusal in message.cancel_reason for refusal in _REFUSALS):
            return StoreRefused(f"watch: {explained(message.cancel_reason)}")
        return StreamLostError(message.cancel_reason or "cancelled by the server")

    async def _read(self) -> Any:
        self._waiting_since_s = asyncio.get_running_loop().time()
        try:
            message = await self._call.read()
        except StatusError as error:
            raise StreamLostError(str(error)) from None
        finally:
            self._waiting_since_s = None
        if message is None:
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
        except StatusError:
            # The call is over; its reader learns why.
            return
