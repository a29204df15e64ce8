# SPDX-License-Identifier: Apache-2.0
"""The memory engine, served over etcd's own v3 gRPC API.

For laptops and tests: everything goes through the production driver, and ``etcdctl`` works on it.
It keeps nothing across a restart; clients notice that by its cluster id.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
from types import TracebackType
from typing import Any, Self

import grpc.aio

from rdzv.errors import ConfigError
from rdzv.store.access import target_of
from rdzv.store.etcd.grpc_endpoint import keep_grpc_running
from rdzv.store.memory.engine import MemoryEngine
from rdzv.store.memory.server_calls import ServedCalls
from rdzv.store.memory.server_watch import serve_watch
from rdzv.store.pb import etcd_pb2 as pb

SERVER_OPTIONS = (
    # Clients may ping every 6 s, also without a call, which etcd does not allow.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", 2 * 1024 * 1024),
    # Two servers on one port would each get some of the clients.
    ("grpc.so_reuseport", 0),
)

MAX_EXPIRY_WAIT_S = 0.5
"""Longest wait before the leases are checked again, in seconds, as one may be granted meanwhile."""


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
        keep_grpc_running()
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers(_handlers(self.engine))
        try:
            port = self._server.add_insecure_port(self._listen)
        except RuntimeError as error:
            why = await asyncio.to_thread(_why_not, self._listen)
            raise ConfigError(f"cannot listen on {self._listen}: {why}") from error
        self.endpoint = f"{self._listen.rpartition(':')[0]}:{port}"
        await self._server.start()
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
        await self._server.stop(grace=None)

    async def _expire(self) -> None:
        engine = self.engine
        while True:
            engine.expire_leases()
            left_s = engine.leases.next_deadline_s() - engine.clock()
            await asyncio.sleep(min(max(left_s, 0.01), MAX_EXPIRY_WAIT_S))


def _why_not(listen: str) -> str:
    """Bind directly, as gRPC does not say why it cannot; return the reason, and what to do."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror:
        return f"the name {host} is not known here: give an address of this machine with --listen"
    except OSError as error:
        match error.errno:
            case errno.EADDRINUSE:
                return f"port {port} is taken by another process: choose another with --listen"
            case errno.EADDRNOTAVAIL:
                return f"this machine has no address {host}: give one of its own with --listen"
            case errno.EACCES:
                return f"port {port} is for root alone: choose one from 1024 on with --listen"
        return f"{error.strerror}: choose another address with --listen"
    return "the port was taken for a moment: try again"


def _handlers(engine: MemoryEngine) -> tuple[grpc.GenericRpcHandler, ...]:
    calls = ServedCalls(engine)

    async def watch(requests: Any, context: grpc.aio.ServicerContext) -> None:
        await serve_watch(engine, calls.header, requests, context)

    def unary(handler: object, request: Any) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(
            handler, request.FromString, lambda response: response.SerializeToString()
        )

    def stream(handler: object, request: Any) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(
            handler, request.FromString, lambda response: response.SerializeToString()
        )

    services = {
        "Auth": {"AuthStatus": unary(calls.auth_status, pb.AuthStatusRequest)},
        "KV": {
            "Range": unary(calls.range, pb.RangeRequest),
            "Put": unary(calls.put, pb.PutRequest),
            "DeleteRange": unary(calls.delete_range, pb.DeleteRangeRequest),
            "Txn": unary(calls.txn, pb.TxnRequest),
            "Compact": unary(calls.compact, pb.CompactionRequest),
        },
        "Lease": {
            "LeaseGrant": unary(calls.lease_grant, pb.LeaseGrantRequest),
            "LeaseRevoke": unary(calls.lease_revoke, pb.LeaseRevokeRequest),
            "LeaseKeepAlive": stream(calls.lease_keep_alive, pb.LeaseKeepAliveRequest),
            "LeaseTimeToLive": unary(calls.lease_time_to_live, pb.LeaseTimeToLiveRequest),
            "LeaseLeases": unary(calls.lease_leases, pb.LeaseLeasesRequest),
        },
        "Maintenance": {
            "Status": unary(calls.status, pb.StatusRequest),
            "Alarm": unary(calls.alarm, pb.AlarmRequest),
        },
        "Watch": {"Watch": stream(watch, pb.WatchRequest)},
    }
    return tuple(
        grpc.method_handlers_generic_handler(f"etcdserverpb.{name}", methods)
        for name, methods in services.items()
    )
