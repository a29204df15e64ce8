# SPDX-License-Identifier: Apache-2.0
"""One etcd member as a client sees it: a channel, its calls, and the streams open on it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import grpc
import grpc.aio

from rdzv.errors import ConfigError
from rdzv.store.pb import etcd_pb2 as pb

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # A frozen peer is found out after 6 + 2 s. Without the HTTP/2 ping time-out it takes 66 s,
    # and etcd ends a connection that pings more often than every 5 s.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # The defaults back off to two minutes: far longer than a store takes to come back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A ping with every message doubles what an idle watch costs, to tune windows that messages of
    # a few KB never fill.
    ("grpc.http2.bdp_probe", 0),
    # A pod's http_proxy is for the web, never for the store.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
)

HAS_LEADER = (("hasleader", "true"),)
"""Metadata that makes a member without a leader say so at once, on streams too."""

_ADDRESS = re.compile(r"(?:http://)?(?P<target>(?:\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):\d{1,5})/?")


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
STATUS = Method("/etcdserverpb.Maintenance/Status", pb.StatusRequest, pb.StatusResponse)
WATCH = Method("/etcdserverpb.Watch/Watch", pb.WatchRequest, pb.WatchResponse)


@cache
def keep_grpc_running() -> None:
    """Hold grpc.aio's poller thread until the process ends; call it before making a channel.

    Else whoever lets go of the last channel joins that thread, within the event loop.
    """
    grpc.aio.init_grpc_aio()


def target_of(address: str, setting: str = "--etcd-endpoints or MUSTER_ETCD_ENDPOINTS") -> str:
    """Take ``host:port`` or ``http://host:port``; raises ``ConfigError`` naming ``setting``."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise ConfigError(
            f"{address!r} is not of the form host:port or http://host:port: correct it in {setting}"
        )
    return match["target"]


class NotSentError(Exception):
    """The request certainly did not leave this machine."""


class AnswerLostError(Exception):
    """The request was sent, and nobody waits for its answer any more."""


class Endpoint:
    """One member. Everything that waits on it ends when the member is given up (``kick``)."""

    def __init__(self, endpoint: str) -> None:
        self.target = target_of(endpoint)
        keep_grpc_running()
        self.connection = 0
        self._closed = False
        self._retiring: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self._on_kick: set[Callable[[str], None]] = set()
        self._open(CHANNEL_OPTIONS)

    async def call(self, method: Method, request: Any, timeout_s: float) -> Any:
        """Make one attempt; raises ``NotSentError``, ``AnswerLostError``, ``grpc.aio.AioRpcError``.

        A call whose stream carries one message each way is made as a unary one: on the wire they
        are the same, and this way a lease renewal cannot outlive its deadline.
        """
        task = asyncio.current_task()
        cancelling = task.cancelling() if task else 0
        sent = False
        try:
            if self._channel.get_state(try_to_connect=True) in _CONNECTING:
                timeout_s = await self._connected(timeout_s)
            sent = True
            return await self._sender(method)(request, timeout=timeout_s, metadata=HAS_LEADER)
        except asyncio.CancelledError:
            # Closing the channel cancels its calls, which looks like a cancelled task.
            if not self._closed or (task and task.cancelling() > cancelling):
                raise
            raise (AnswerLostError if sent else NotSentError)("this client was closed") from None

    def open_watch(self, on_kick: Callable[[str], None]) -> grpc.aio.StreamStreamCall:
        """Open a watch stream; ``on_kick`` is called, with the reason, to end it early."""
        self._on_kick.add(on_kick)
        return self._watch(metadata=HAS_LEADER)

    def forget_watch(self, on_kick: Callable[[str], None]) -> None:
        """Undo ``open_watch``."""
        self._on_kick.discard(on_kick)

    def kick(self, reason: str) -> None:
        """End every watch here: what one call has found out, no stream needs to find out again."""
        for on_kick in tuple(self._on_kick):
            on_kick(reason)

    def reconnect(self, grace_s: float) -> None:
        """Make later calls on a new connection; those under way have ``grace_s`` to end.

        A single endpoint is often one name or address for several members: a new connection may
        reach another one, where the old one would hang until its ping fails.
        """
        if self._closed:
            return
        old = self._channel
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
            await channel.close()
        if self._retiring:
            await asyncio.wait(self._retiring)

    def _open(self, options: Sequence[tuple[str, int]]) -> None:
        self._channel = grpc.aio.insecure_channel(self.target, options=options)
        self._senders: dict[str, grpc.aio.UnaryUnaryMultiCallable] = {}
        self._watch: grpc.aio.StreamStreamMultiCallable = self._channel.stream_stream(
            WATCH.path,
            request_serializer=WATCH.request.SerializeToString,
            response_deserializer=WATCH.response.FromString,
        )

    def _sender(self, method: Method) -> grpc.aio.UnaryUnaryMultiCallable:
        sender = self._senders.get(method.path)
        if sender is None:
            sender = self._senders[method.path] = self._channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
        return sender

    async def _connected(self, timeout_s: float) -> float:
        """Wait for the connection and return the time left.

        So a request that its deadline ends was sent for sure, and one that was not sent is known.
        A connection that failed is not waited for: the request itself then fails with the reason.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline_s):
                state = self._channel.get_state(try_to_connect=True)
                while state in _CONNECTING:
                    await self._channel.wait_for_state_change(state)
                    state = self._channel.get_state(try_to_connect=True)
        except TimeoutError:
            raise NotSentError(f"no connection within {timeout_s:.1f} s") from None
        if self._closed:
            raise NotSentError("this client was closed")
        return max(deadline_s - loop.time(), 0.001)


_connections = count(1)
_CONNECTING = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)


class Rotation:
    """The endpoints of one cluster, and which of them to use now."""

    def __init__(self, endpoints: Sequence[Endpoint], first: int) -> None:
        self._endpoints = endpoints
        self._at = first % len(endpoints)

    def __len__(self) -> int:
        return len(self._endpoints)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._endpoints)

    @property
    def current(self) -> Endpoint:
        """The endpoint to use now."""
        return self._endpoints[self._at]

    def leave(self, endpoint: Endpoint) -> None:
        """Move on from ``endpoint``, unless somebody else has done so already."""
        if self.current is endpoint:
            self._at = (self._at + 1) % len(self._endpoints)
