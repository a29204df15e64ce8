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
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rdzv.errors import ConfigError
from rdzv.store.access import target_of
from rdzv.store.memory.engine import MemoryEngine
from rdzv.store.memory.served_connection import ServedCall, ServedConnection, Service, Services
from rdzv.store.memory.server_calls import Answering, ServedCalls
from rdzv.store.memory.server_watch import ServedWatch
from rdzv.store.pb import etcd_pb2 as pb

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
