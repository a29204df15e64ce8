# SPDX-License-Identifier: Apache-2.0
"""The default store driver: a thin etcd client on ``grpc.aio``.

It differs from stock clients in four points. Every attempt has a deadline of its own and the next
one goes to the next endpoint. A deadline that passes also moves the watches off that endpoint.
A write is repeated only if it certainly was not sent or is idempotent. A lease is renewed by
single bounded calls, because a long renewal stream through a follower hangs on a frozen leader
for longer than the lease lives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import grpc.aio

from rdzv.errors import (
    Compacted,
    ConfigError,
    LeaseLost,
    StoreAmbiguous,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from rdzv.store.endpoints import (
    COMPACT,
    GRANT,
    KEEP_ALIVE,
    RANGE,
    REVOKE,
    STATUS,
    TXN,
    AnswerLostError,
    Endpoint,
    Method,
    NotSentError,
    Rotation,
)
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
from rdzv.store.taxonomy import Outcome, outcome

log = logging.getLogger(__name__)

ATTEMPT_S = 1.0
"""Deadline of one attempt: an election plus one lost attempt fit well into a lease of 10 s."""

ROUND_PAUSE_S = 0.1
"""Between two rounds over all endpoints that failed at once; a watch waits longer each round."""

MAX_ROUND_PAUSE_S = 0.5


class Effect(Enum):
    """What repeating a call does."""

    READ = auto()
    IDEMPOTENT = auto()
    ONCE = auto()


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
        self._rotation = Rotation([Endpoint(endpoint) for endpoint in endpoints], first)
        self._closing = asyncio.Event()

    async def range(
        self, key: str, *, prefix: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> RangeResult:
        """Read linearizably."""
        interval = Interval.of(key, prefix=prefix)
        request = pb.RangeRequest(key=interval.start, range_end=interval.end)
        response = await self._call(RANGE, request, timeout_s, Effect.READ)
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
        return txn_result(await self._call(TXN, request, timeout_s, Effect.ONCE))

    async def watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Follow every key under ``prefix`` from ``start_revision`` on (inclusive)."""
        if start_revision < 1:
            raise ValueError(f"a watch starts at revision 1 or later, got {start_revision}")
        interval = Interval.of(prefix, prefix=True)
        next_revision = start_revision
        life: _Life | None = None
        failures = 0
        while not self._closing.is_set():
            endpoint = self._rotation.current
            try:
                life = await self._same_life(endpoint, interval, next_revision, life)
                stream = WatchStream(endpoint, interval, next_revision, life.revision)
                async with stream:
                    while not self._closing.is_set():
                        batch = await stream.next_batch()
                        next_revision = batch.revision + 1
                        failures = 0
                        yield batch
            except (StreamLostError, StoreUnavailable) as lost:
                if self._closing.is_set():
                    return
                failures += 1
                self._rotation.leave(endpoint)
                if failures == 1:
                    log.info("the watch leaves store endpoint %s: %s", endpoint.target, lost)
                rounds = failures // len(self._rotation)
                if rounds:
                    await self._pause(min(ROUND_PAUSE_S * rounds, MAX_ROUND_PAUSE_S))

    async def lease_grant(
        self, lease_id: int, ttl_s: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Grant the lease ``lease_id``; one that exists counts as success."""
        if lease_id <= 0:
            raise ValueError(f"a lease id is a positive number, got {lease_id}")
        request = pb.LeaseGrantRequest(ID=lease_id, TTL=ttl_s)
        await self._call(GRANT, request, timeout_s, Effect.IDEMPOTENT, done=Outcome.LEASE_EXISTS)

    async def lease_keep_alive(
        self, lease_id: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> float:
        """Renew once and return the time to live in seconds; raises ``LeaseLost``."""
        request = pb.LeaseKeepAliveRequest(ID=lease_id)
        response = await self._call(KEEP_ALIVE, request, timeout_s, Effect.IDEMPOTENT)
        if response.TTL <= 0:
            raise LeaseLost(f"lease {lease_id:x} does not exist")
        return float(response.TTL)

    async def lease_revoke(self, lease_id: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """End the lease and delete its keys; a lease that is gone counts as success."""
        request = pb.LeaseRevokeRequest(ID=lease_id)
        await self._call(REVOKE, request, timeout_s, Effect.IDEMPOTENT, done=Outcome.LEASE_LOST)

    async def compact(self, revision: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Forget the history before ``revision``; one already forgotten counts as success."""
        request = pb.CompactionRequest(revision=revision)
        await self._call(COMPACT, request, timeout_s, Effect.IDEMPOTENT, done=Outcome.COMPACTED)

    async def status(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> StoreStatus:
        """Ask one reachable endpoint about itself."""
        endpoint, response = await self._call_somewhere(
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
        if self._closing.is_set():
            return
        self._closing.set()
        for endpoint in self._rotation:
            await endpoint.close()

    async def _call(
        self,
        method: Method,
        request: Any,
        timeout_s: float,
        effect: Effect,
        *,
        done: Outcome | None = None,
    ) -> Any:
        """Make a call; an answer of outcome ``done`` is a success without a response."""
        _, response = await self._call_somewhere(method, request, timeout_s, effect, done=done)
        return response

    async def _call_somewhere(
        self,
        method: Method,
        request: Any,
        timeout_s: float,
        effect: Effect,
        *,
        done: Outcome | None = None,
    ) -> tuple[Endpoint, Any]:
        """Try the endpoints in turn until one answers, the deadline, or an ambiguous write."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        attempts = 0
        ambiguous = False
        while True:
            endpoint = self._rotation.current
            left_s = deadline_s - loop.time()
            try:
                return endpoint, await self._attempt(endpoint, method, request, left_s)
            except _AttemptError as failed:
                if failed.outcome is done:
                    return endpoint, None
                if failed.outcome not in (Outcome.NOT_APPLIED, Outcome.AMBIGUOUS):
                    raise failed.verdict() from None
                reason = str(failed)
                ambiguous |= failed.outcome is Outcome.AMBIGUOUS and effect is not Effect.READ
            attempts += 1
            if self._closing.is_set() or (ambiguous and effect is Effect.ONCE):
                break
            if attempts % len(self._rotation) == 0:
                await self._pause(min(ROUND_PAUSE_S, max(deadline_s - loop.time(), 0)))
            if loop.time() >= deadline_s:
                break
        kind = StoreAmbiguous if ambiguous else StoreUnavailable
        raise kind(
            f"{reason} ({attempts} attempts in {loop.time() - deadline_s + timeout_s:.1f} s)"
        )

    async def _attempt(
        self, endpoint: Endpoint, method: Method, request: Any, left_s: float
    ) -> Any:
        """Make one call at one endpoint; moves the watches away as well if that is needed."""
        if self._closing.is_set():
            raise _AttemptError(Outcome.NOT_APPLIED, method, endpoint, "this client is closed")
        try:
            return await endpoint.call(method, request, min(ATTEMPT_S, left_s))
        except NotSentError as error:
            failed = _AttemptError(Outcome.NOT_APPLIED, method, endpoint, str(error))
            timed_out = True
        except AnswerLostError as error:
            failed = _AttemptError(Outcome.AMBIGUOUS, method, endpoint, str(error))
            timed_out = False
        except grpc.aio.AioRpcError as error:
            message = error.details() or str(error.code())
            failed = _AttemptError(outcome(error.code(), message), method, endpoint, message)
            timed_out = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if failed.outcome in (Outcome.NOT_APPLIED, Outcome.AMBIGUOUS):
            self._rotation.leave(endpoint)
            if timed_out and left_s >= ATTEMPT_S:
                endpoint.kick(str(failed))
                if len(self._rotation) == 1 and failed.outcome is Outcome.AMBIGUOUS:
                    endpoint.reconnect(ATTEMPT_S)
        raise failed

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
            response = await self._attempt(endpoint, RANGE, request, ATTEMPT_S)
        except _AttemptError as failed:
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

    async def _pause(self, pause_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._closing.wait()


@dataclass(frozen=True, slots=True)
class _Life:
    """Which store it is, and how far it has come."""

    cluster_id: int
    raft_term: int
    revision: int


class _AttemptError(Exception):
    """One attempt failed."""

    def __init__(self, verdict: Outcome, method: Method, endpoint: Endpoint, message: str) -> None:
        super().__init__(f"{method.path.rpartition('/')[2]} at {endpoint.target}: {message}")
        self.outcome = verdict

    def verdict(self) -> StoreError:
        """Translate into what callers see where no other attempt is made."""
        text = str(self)
        match self.outcome:
            case Outcome.LEASE_LOST:
                return LeaseLost(text)
            case Outcome.NOT_APPLIED | Outcome.AMBIGUOUS:
                return StoreUnavailable(text)
            case _:
                return StoreRefused(text)
