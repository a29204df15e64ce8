# SPDX-License-Identifier: Apache-2.0
"""One client of the etcd3 package, and whether its connection is up. Most of this blocks."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from time import monotonic
from typing import Any

from rdzv.store.access import Access
from rdzv.store.etcd.endpoint import (
    STATUS,
    AnswerLostError,
    BusyError,
    Metadata,
    Method,
    NotSentError,
)
from rdzv.store.etcd.errors import StatusCode, StatusError, explained
from rdzv.store.etcd3.calls import make_call
from rdzv.store.etcd3.package import Etcd3Client
from rdzv.store.pb import etcd_pb2 as pb

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
