# SPDX-License-Identifier: Apache-2.0
"""One etcd member over a channel of ``grpc.aio``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from typing import Any

import grpc
import grpc.aio

from rdzv.store.etcd.certificates import CertificateFiles
from rdzv.store.etcd.endpoint import (
    HAS_LEADER,
    RETIRE_S,
    WATCH,
    AnswerLostError,
    EtcdEndpoint,
    Metadata,
    Method,
    NotSentError,
    WatchCall,
)
from rdzv.store.etcd.errors import StatusCode, StatusError

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
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


@cache
def keep_grpc_running() -> None:
    """Hold grpc.aio's poller thread until the process ends; call it before making a channel.

    Otherwise the code that drops the last channel joins that thread, within the event loop.
    """
    grpc.aio.init_grpc_aio()


class GrpcWatch:
    """A stream of ``grpc.aio`` as a ``WatchCall``."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self._call = call
        self._cancelled = False

    async def write(self, request: Any) -> None:
        """Send a request; raise ``StatusError`` if the stream is over."""
        try:
            await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            raise status_error(error) from None
        except asyncio.InvalidStateError as error:
            raise StatusError(StatusCode.CANCELLED, str(error)) from None

    async def read(self) -> Any:
        """Wait for a message; return None at the end, or raise ``StatusError``."""
        task = asyncio.current_task()
        cancelling = task.cancelling() if task else 0
        try:
            message = await self._call.read()
        except asyncio.CancelledError:
            # A cancelled call looks like a cancelled task; only the latter is passed on.
            if not self._cancelled or (task and task.cancelling() > cancelling):
                raise
            return None
        except grpc.aio.AioRpcError as error:
            raise status_error(error) from None
        return None if message is grpc.aio.EOF else message

    def cancel(self) -> None:
        """End the stream; a reader gets None."""
        self._cancelled = True
        self._call.cancel()


class GrpcEndpoint(EtcdEndpoint):
    """An ``EtcdEndpoint`` on ``grpc.aio``."""

    def __init__(self, target: str, files: CertificateFiles | None = None) -> None:
        super().__init__(target, files)
        keep_grpc_running()
        self._channel: grpc.aio.Channel | None = None
        self._retiring: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self._metadata: Metadata = ()
        self._wire_metadata = grpc.aio.Metadata()

    async def call(
        self, method: Method, request: Any, timeout_s: float, metadata: Metadata = HAS_LEADER
    ) -> Any:
        """Make one attempt; raise ``NotSentError``, ``AnswerLostError``, ``StatusError``."""
        task = asyncio.current_task()
        cancelling = task.cancelling() if task else 0
        sent = False
        try:
            while True:
                channel = self._channel
                if channel is None or self._files is not None:
                    channel, timeout_s = await self._opened(timeout_s)
                if channel.get_state(try_to_connect=True) not in _CONNECTING:
                    break
                timeout_s = await self._connected(channel, timeout_s)
                if self._channel is channel:
                    break
                # The channel was replaced: requests go over its successor, which has to connect
                # first.
            sent = True
            carried = self._carried(metadata)
            return await self._sender(method)(request, timeout=timeout_s, metadata=carried)
        except asyncio.CancelledError:
            # Closing a channel cancels its calls, which looks like a cancelled task.
            if task is None or task.cancelling() > cancelling:
                raise
            closed = "client" if self._closed else "connection"
            raise (AnswerLostError if sent else NotSentError)(f"this {closed} was closed") from None
        except grpc.aio.AioRpcError as error:
            raise status_error(error) from None

    def open_watch(
        self, on_kick: Callable[[str], None], metadata: Metadata = HAS_LEADER
    ) -> WatchCall:
        """Open a watch stream; ``on_kick`` is called, with the reason, to end it early."""
        self._on_kick.add(on_kick)
        return GrpcWatch(self._watch(metadata=metadata))

    def reconnect(self, grace_s: float = RETIRE_S) -> None:
        """Make later calls on a new connection; those under way have ``grace_s`` to end."""
        old = self._channel
        self.silent = False
        self.store_id = 0
        if self._closed or old is None:
            return
        # grpc shares connections between channels of equal options, so these must differ.
        self.connection = next(_connections)
        self._open((*CHANNEL_OPTIONS, ("muster.connection", self.connection)))
        retiring = asyncio.create_task(old.close(grace=grace_s), name="retiring connection")
        self._retiring[retiring] = old
        retiring.add_done_callback(self._retiring.pop)

    async def close(self) -> None:
        """Close the channel; calls that wait on it are cancelled."""
        self._closed = True
        self.kick("the store client is closed")
        for channel in (self._channel, *self._retiring.values()):
            if channel is not None:
                await channel.close()
        if self._retiring:
            await asyncio.wait(self._retiring)

    async def _opened(self, timeout_s: float) -> tuple[grpc.aio.Channel, float]:
        """Return a channel with the present certificates, and the time left.

        Raises ``NotSentError`` if the files cannot be read in time, or the client was closed.
        """
        channel = self._channel
        ready = channel is not None and channel.get_state() is _READY
        timeout_s = await self._look(timeout_s, ready=ready)
        if self._channel is None:
            self._open(CHANNEL_OPTIONS)
        elif self._files is not None and self._files.version != self._files_version:
            # Before the connection ends, so that no stream takes that for its own cancellation.
            self.kick("the certificate files have changed")
            self.reconnect()
        assert self._channel is not None
        return self._channel, timeout_s

    def _open(self, options: Sequence[tuple[str, int]]) -> None:
        if self._files is None:
            self._channel = grpc.aio.insecure_channel(self.target, options=options)
        else:
            found = self._files.certificates
            assert found is not None
            self._files_version = self._files.version
            credentials = grpc.ssl_channel_credentials(found.cacert, found.key, found.cert)
            self._channel = grpc.aio.secure_channel(self.target, credentials, options=options)
        self._senders: dict[str, grpc.aio.UnaryUnaryMultiCallable] = {}
        self._watch: grpc.aio.StreamStreamMultiCallable = self._channel.stream_stream(
            WATCH.path,
            request_serializer=WATCH.request.SerializeToString,
            response_deserializer=WATCH.response.FromString,
        )

    def _carried(self, metadata: Metadata) -> grpc.aio.Metadata:
        """Return ``metadata`` in grpc's own form, rebuilt only when it changes."""
        if metadata != self._metadata:
            self._metadata, self._wire_metadata = metadata, grpc.aio.Metadata(*metadata)
        return self._wire_metadata

    def _sender(self, method: Method) -> grpc.aio.UnaryUnaryMultiCallable:
        sender = self._senders.get(method.path)
        if sender is None:
            assert self._channel is not None
            sender = self._senders[method.path] = self._channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
        return sender

    async def _connected(self, channel: grpc.aio.Channel, timeout_s: float) -> float:
        """Wait for the connection and return the time left.

        So a request that ends at its deadline was certainly sent, and one that was not sent is
        known. It does not wait for a connection that failed: the request itself then fails with the
        reason.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline_s):
                state = channel.get_state(try_to_connect=True)
                while state in _CONNECTING:
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError:
            raise NotSentError(f"no connection within {timeout_s:.1f} s") from None
        if self._closed:
            raise NotSentError("this client was closed")
        return max(deadline_s - loop.time(), 0.001)


_connections = count(1)
_READY = grpc.ChannelConnectivity.READY
_CONNECTING = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)


def status_error(error: grpc.aio.AioRpcError) -> StatusError:
    """Convert an error of grpc's."""
    code = StatusCode(error.code().value[0])
    return StatusError(code, error.details() or str(error.code()))
