# SPDX-License-Identifier: Apache-2.0
"""The default store driver: a thin etcd client on ``grpc.aio``.

It differs from stock clients in four points. Every attempt has a deadline of its own and the next
one goes to the next endpoint. A deadline that passes also moves the watches off that endpoint.
A write is repeated only if it certainly was not sent or is idempotent. A lease is renewed by
single bounded calls, because a long renewal stream through a follower hangs on a frozen leader
for longer than the lease lives.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from rdzv.errors import Compacted, ConfigError, LeaseLost, StoreUnavailable
from rdzv.store.endpoints import (
    COMPACT,
    GRANT,
    KEEP_ALIVE,
    RANGE,
    REVOKE,
    STATUS,
    TXN,
    Endpoint,
)
from rdzv.store.etcd_calls import ATTEMPT_S, ROUND_PAUSE_S, AttemptError, Calls, Effect
from rdzv.store.etcd_watch import StreamLostError, WatchStream
from rdzv.store.interface import (
    DEFAULT_TIMEOUT_S,
    Compare,
    Operation,
    RangeResult,
    StoreStatus,
    TxnResult,
    WatchBatch,
)
from rdzv.store.intervals import Interval
from rdzv.store.messages import key_value, txn_request, txn_result
from rdzv.store.pb import etcd_pb2 as pb
from rdzv.store.taxonomy import Outcome

log = logging.getLogger(__name__)

MAX_ROUND_PAUSE_S = 0.5
"""A watch that no endpoint serves waits longer with each round, up to this."""


class EtcdStore:
    """A ``Store`` on etcd. Create it within a running event loop.

    ``endpoints`` are ``host:port`` or ``http://host:port``; ``first`` says with which one to
    begin, so that many clients can be spread over them. Raises ``ConfigError``.
    """

    def __init__(self, endpoints: Sequence[str], *, first: int = 0) -> None:
        if not endpoints:
            raise ConfigError(
                "no etcd endpoint: give at least one host:port in --etcd-endpoints or "
                "MUSTER_ETCD_ENDPOINTS"
            )
        self._calls = Calls([Endpoint(endpoint) for endpoint in endpoints], first)

    async def range(
        self, key: str, *, prefix: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> RangeResult:
        """Read linearizably."""
        interval = Interval.of(key, prefix=prefix)
        request = pb.RangeRequest(key=interval.start, range_end=interval.end)
        response = await self._calls.call(RANGE, request, timeout_s, Effect.READ)
        return RangeResult(response.header.revision, tuple(map(key_value, response.kvs)))

    async def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> TxnResult:
        """Apply ``then`` if every compare holds, else ``otherwise``; atomically.

        An attempt that gets no answer within 1 s ends in ``StoreAmbiguous`` even if ``timeout_s``
        is longer: re-reading on another endpoint settles it sooner than waiting does.
        """
        request = txn_request(compares, then, otherwise)
        return txn_result(await self._calls.call(TXN, request, timeout_s, Effect.ONCE))

    async def watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Follow every key under ``prefix`` from ``start_revision`` on (inclusive)."""
        if start_revision < 1:
            raise ValueError(f"a watch starts at revision 1 or later, got {start_revision}")
        interval = Interval.of(prefix, prefix=True)
        next_revision = start_revision
        life: _Life | None = None
        failures = 0
        while not self._calls.closed:
            endpoint = self._calls.rotation.current
            try:
                life = await self._same_life(endpoint, interval, next_revision, life)
                stream = WatchStream(endpoint, interval, next_revision, life.revision)
                async with stream:
                    while not self._calls.closed:
                        batch = await stream.next_batch()
                        next_revision = batch.revision + 1
                        failures = 0
                        yield batch
            except (StreamLostError, StoreUnavailable) as lost:
                if self._calls.closed:
                    return
                failures += 1
                self._calls.rotation.leave(endpoint)
                if failures == 1:
                    log.info("the watch leaves store endpoint %s: %s", endpoint.target, lost)
                rounds = failures // len(self._calls.rotation)
                if rounds:
                    await self._calls.pause(min(ROUND_PAUSE_S * rounds, MAX_ROUND_PAUSE_S))

    async def lease_grant(
        self, lease_id: int, ttl_s: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Grant the lease ``lease_id``; one that exists counts as success."""
        if lease_id <= 0:
            raise ValueError(f"a lease id is a positive number, got {lease_id}")
        request = pb.LeaseGrantRequest(ID=lease_id, TTL=ttl_s)
        await self._calls.call(
            GRANT, request, timeout_s, Effect.IDEMPOTENT, done=Outcome.LEASE_EXISTS
        )

    async def lease_keep_alive(
        self, lease_id: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> float:
        """Renew once and return the time to live in seconds; raises ``LeaseLost``."""
        request = pb.LeaseKeepAliveRequest(ID=lease_id)
        response = await self._calls.call(KEEP_ALIVE, request, timeout_s, Effect.IDEMPOTENT)
        if response.TTL <= 0:
            raise LeaseLost(f"lease {lease_id:x} does not exist")
        return float(response.TTL)

    async def lease_revoke(self, lease_id: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """End the lease and delete its keys; a lease that is gone counts as success."""
        request = pb.LeaseRevokeRequest(ID=lease_id)
        await self._calls.call(
            REVOKE, request, timeout_s, Effect.IDEMPOTENT, done=Outcome.LEASE_LOST
        )

    async def compact(self, revision: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Forget the history before ``revision``; one already forgotten counts as success."""
        request = pb.CompactionRequest(revision=revision)
        await self._calls.call(
            COMPACT, request, timeout_s, Effect.IDEMPOTENT, done=Outcome.COMPACTED
        )

    async def status(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> StoreStatus:
        """Ask one reachable endpoint about itself."""
        endpoint, response = await self._calls.call_somewhere(
            STATUS, pb.StatusRequest(), timeout_s, Effect.READ
        )
        return StoreStatus(
            endpoint=endpoint.target,
            version=response.version,
            cluster_id=response.header.cluster_id,
            member_id=response.header.member_id,
            leader_id=response.leader,
            revision=response.header.revision,
            db_size_bytes=response.db_size,
            db_size_in_use_bytes=response.db_size_in_use,
            errors=tuple(response.errors),
        )

    async def close(self) -> None:
        """Give every connection back; watches end, later calls raise ``StoreUnavailable``."""
        await self._calls.close()

    async def _same_life(
        self,
        endpoint: Endpoint,
        interval: Interval,
        next_revision: int,
        life: _Life | None,
    ) -> _Life:
        """Make sure that ``endpoint`` has the history that the watch has seen so far.

        A store that was emptied or restored counts its revisions anew: a watch on it would stay
        silent until it gets there, or skip what lies between. One linearizable read tells, by
        the cluster's id, its raft term (which never falls) and the revision. It also keeps the
        watch off a member that is frozen or lags behind.
        """
        request = pb.RangeRequest(key=interval.start, count_only=True)
        try:
            response = await self._calls.attempt(endpoint, RANGE, request, ATTEMPT_S)
        except AttemptError as failed:
            raise failed.verdict() from None
        header = response.header
        if header.revision < next_revision - 1 or (
            life is not None
            and (header.cluster_id != life.cluster_id or header.raft_term < life.raft_term)
        ):
            raise Compacted(
                f"the store is not the one that had revision {next_revision - 1}: it was emptied "
                f"or restored, and is at revision {header.revision} now",
                header.revision,
            )
        return _Life(header.cluster_id, header.raft_term, header.revision)


@dataclass(frozen=True, slots=True)
class _Life:
    """Which store it is, and how far it has come."""

    cluster_id: int
    raft_term: int
    revision: int
