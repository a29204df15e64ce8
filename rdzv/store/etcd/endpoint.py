# SPDX-License-Identifier: Apache-2.0
"""One etcd member as a client sees it: a channel, its calls, and the streams open on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from random import Random
from typing import Any

import grpc
import grpc.aio

from rdzv.errors import ConfigError
from rdzv.store.etcd.certificates import CertificateFiles
from rdzv.store.etcd.deadlines import Patience
from rdzv.store.pb import etcd_pb2 as pb

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

Metadata = tuple[tuple[str, str], ...]

HAS_LEADER: Metadata = (("hasleader", "true"),)
"""Metadata that makes a member without a leader say so at once, on streams too."""


@dataclass(frozen=True, slots=True)
class Method:
    """One call of etcd's v3 API."""

    path: str
    request: Any
    response: Any


RANGE = Method("/etcdserverpb.KV/Range", pb.RangeRequest, pb.RangeResponse)
TXN = Method("/etcdserverpb.KV/Txn", pb.TxnRequest, pb.TxnResponse)
COMPACT = Method("/etcdserverpb.KV/Compact", pb.CompactionRequest, pb.CompactionResponse)
GRANT = Method("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)
KEEP_ALIVE = Method(
    "/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse
)
AUTHENTICATE = Method(
    "/etcdserverpb.Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse
)
AUTH_STATUS = Method("/etcdserverpb.Auth/AuthStatus", pb.AuthStatusRequest, pb.AuthStatusResponse)
USER_ADD = Method("/etcdserverpb.Auth/UserAdd", pb.AuthUserAddRequest, pb.AuthUserAddResponse)
USER_CHANGE_PASSWORD = Method(
    "/etcdserverpb.Auth/UserChangePassword",
    pb.AuthUserChangePasswordRequest,
    pb.AuthUserChangePasswordResponse,
)
USER_GRANT_ROLE = Method(
    "/etcdserverpb.Auth/UserGrantRole", pb.AuthUserGrantRoleRequest, pb.AuthUserGrantRoleResponse
)
ROLE_ADD = Method("/etcdserverpb.Auth/RoleAdd", pb.AuthRoleAddRequest, pb.AuthRoleAddResponse)
ROLE_GRANT_PERMISSION = Method(
    "/etcdserverpb.Auth/RoleGrantPermission",
    pb.AuthRoleGrantPermissionRequest,
    pb.AuthRoleGrantPermissionResponse,
)
STATUS = Method("/etcdserverpb.Maintenance/Status", pb.StatusRequest, pb.StatusResponse)
WATCH = Method("/etcdserverpb.Watch/Watch", pb.WatchRequest, pb.WatchResponse)


@cache
def keep_grpc_running() -> None:
    """Hold grpc.aio's poller thread until the process ends; call it before making a channel.

    Otherwise the code that drops the last channel joins that thread, within the event loop.
    """
    grpc.aio.init_grpc_aio()


RETIRE_S = 3.0
"""Time for the calls under way on a connection that is given up, in seconds: a password takes
longest."""


class NotSentError(Exception):
    """The request certainly did not leave this machine."""


class BusyError(NotSentError):
    """Nothing was sent, as no thread was free here: that is no fault of the member."""


class AnswerLostError(Exception):
    """The request was sent, and no caller waits for its answer any more."""


class EtcdEndpoint:
    """One member. Its watches end when the member is given up (``kick``).

    With ``files`` the connection is TLS, the member's name is verified, and a new connection is
    made when the files have changed.
    """

    def __init__(self, target: str, files: CertificateFiles | None = None) -> None:
        self.target = target
        keep_grpc_running()
        self.connection = 0
        self.patience = Patience()
        self.silent = False
        """Whether the newest attempt here took its whole timeout without any answer."""
        self.store_id = 0
        """The id of its store; 0 if it has not said so since the last failure here."""
        self._files = files
        self._files_version = 0
        self._channel: grpc.aio.Channel | None = None
        self._closed = False
        self._retiring: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self._on_kick: set[Callable[[str], None]] = set()
        self._metadata: Metadata = ()
        self._wire_metadata = grpc.aio.Metadata()

    async def call(
        self, method: Method, request: Any, timeout_s: float, metadata: Metadata = HAS_LEADER
    ) -> Any:
        """Make one attempt; raise ``NotSentError``, ``AnswerLostError``, ``grpc.aio.AioRpcError``.

        A call whose stream carries one message each way is made as a unary one: on the wire they
        are the same, and this way a lease renewal cannot outlive its deadline.
        """
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

    def open_watch(
        self, on_kick: Callable[[str], None], metadata: Metadata = HAS_LEADER
    ) -> grpc.aio.StreamStreamCall:
        """Open a watch stream; ``on_kick`` is called, with the reason, to end it early.

        Only after a ``call``, which makes the connection.
        """
        self._on_kick.add(on_kick)
        return self._watch(metadata=metadata)

    def forget_watch(self, on_kick: Callable[[str], None]) -> None:
        """Stop calling ``on_kick``: the watch has ended."""
        self._on_kick.discard(on_kick)

    def kick(self, reason: str) -> None:
        """End every watch here, so that no stream has to find out again what one call has."""
        for on_kick in tuple(self._on_kick):
            on_kick(reason)

    def reconnect(self, grace_s: float = RETIRE_S) -> None:
        """Make later calls on a new connection; those under way have ``grace_s`` to end.

        A single endpoint is often one name or address for several members: a new connection may
        reach another one, where the old one would hang until its ping fails.
        """
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
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        channel = self._channel
        if self._files is not None:
            ready = channel is not None and channel.get_state() is _READY
            try:
                await self._files.look(urgent=not ready, timeout_s=timeout_s)
            except ConfigError as error:
                raise NotSentError(str(error)) from None
            except TimeoutError:
                raise NotSentError(
                    f"the certificate files cannot be read within {timeout_s:.1f} s"
                ) from None
            if self._closed:
                raise NotSentError("this client was closed")
        if self._channel is None:
            self._open(CHANNEL_OPTIONS)
        elif self._files is not None and self._files.version != self._files_version:
            # Before the connection ends, so that no stream takes that for its own cancellation.
            self.kick("the certificate files have changed")
            self.reconnect()
        assert self._channel is not None
        return self._channel, max(deadline_s - asyncio.get_running_loop().time(), 0.001)

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
        """Return ``metadata`` in grpc's own form, made anew only when it changes."""
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


class Rotation:
    """The endpoints of one cluster, and the one of them to use now."""

    def __init__(self, endpoints: Sequence[EtcdEndpoint], first: int, random: Random) -> None:
        self._endpoints = endpoints
        self._random = random
        self.current = endpoints[first % len(endpoints)]
        """The endpoint to use now."""

    def __len__(self) -> int:
        return len(self._endpoints)

    def __iter__(self) -> Iterator[EtcdEndpoint]:
        return iter(self._endpoints)

    def leave(
        self, endpoint: EtcdEndpoint, tried: tuple[EtcdEndpoint, ...]
    ) -> tuple[EtcdEndpoint, ...]:
        """Move on from ``endpoint``, unless another call has done so already.

        The next one is drawn, so that the clients of a member that ends spread over the others. It
        is none of ``tried``, which have failed before in the same round, while there is another.
        Returns what the round has tried by now: nothing once that is all of them.
        """
        endpoint.store_id = 0
        tried = (*tried, endpoint)
        others = [other for other in self._endpoints if other is not endpoint]
        fresh = [other for other in others if other not in tried]
        if self.current is endpoint:
            found = fresh or others
        else:
            found = fresh if self.current in tried else []
        if found:
            self.current = self._random.choice(found)
            self.current.patience.expect(endpoint.patience)
        return tried if fresh else ()
