# SPDX-License-Identifier: Apache-2.0
"""The store driver, a thin etcd client on HTTP/2 of Muster's own, and the opening of a store.

It differs from stock clients in four points. Every attempt has a deadline of its own and the next
one goes to the next endpoint. A deadline that passes also moves the watches off that endpoint. A
write is repeated only if it certainly was not sent or is idempotent. A lease is renewed by single
bounded calls, because a long renewal stream through a follower hangs on a frozen leader for longer
than the lease lives.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from importlib import import_module
from random import Random
from typing import cast

from rdzv.dataclass import dataclass
from rdzv.errors import Compacted, ConfigError, LeaseLost, StoreRefused, StoreUnavailable
from rdzv.sentences import named
from rdzv.store import etcd_pb2 as pb
from rdzv.store.access import Access
from rdzv.store.etcd.answers import (
    Outcome,
    key_value,
    progress_is_certain,
    span,
    txn_request,
    txn_result,
)
from rdzv.store.etcd.calls import AttemptError, Calls, Effect
from rdzv.store.etcd.endpoint import (
    COMPACT,
    GRANT,
    KEEP_ALIVE,
    RANGE,
    REVOKE,
    STATUS,
    TXN,
    EtcdEndpoint,
)
from rdzv.store.etcd.http2_endpoint import endpoints_of
from rdzv.store.etcd.watch import StreamLostError, WatchCursor, WatchStream
from rdzv.store.interface import (
    DEFAULT_TIMEOUT_S,
    Compare,
    Interval,
    Operation,
    Page,
    RangeResult,
    Rest,
    Store,
    StoreStatus,
    TxnResult,
    WatchBatch,
)

log = logging.getLogger(__name__)


class EtcdStore:
    """A ``Store`` on etcd. Create it within a running event loop.

    ``access`` may be endpoints alone, for plain text and no user; ``first`` is the index of the one
    to begin with, so that many clients can be spread over them. ``random`` draws the backoff and
    the endpoints after it; without it the client has one of its own. Raises ``ConfigError``.
    """

    def __init__(
        self, access: Access | Sequence[str], *, first: int = 0, random: Random | None = None
    ) -> None:
        if not isinstance(access, Access):
            access = Access(tuple(access))
        endpoints = self._endpoints(access)
        self._calls = Calls(endpoints, first, access, Random() if random is None else random)

    async def range(
        self, key: str, *, prefix: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> RangeResult:
        """Read one key, or all with a prefix, linearizably."""
        request = pb.RangeRequest(**span(key, prefix=prefix))
        _, response = await self._calls.call(RANGE, request, timeout_s, Effect.READ)
        return RangeResult(response.header.revision, tuple(map(key_value, response.kvs)))

    async def page(
        self,
        prefix: str,
        *,
        limit: int,
        after: str = "",
        revision: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Page:
        """Read the first ``limit`` keys under ``prefix`` that come after the key ``after``."""
        interval = Interval.after(after, prefix)
        request = pb.RangeRequest(
            key=interval.start, range_end=interval.end, limit=limit, revision=revision
        )
        _, response = await self._calls.call(
            RANGE, request, timeout_s, Effect.READ, attempt_s=timeout_s / 2
        )
        kvs = tuple(map(key_value, response.kvs))
        return Page(revision or response.header.revision, kvs, response.more)

    async def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> TxnResult:
        """Apply ``then`` if every compare holds, else ``otherwise``; atomically.

        An attempt that gets no answer in its time ends in ``StoreAmbiguous`` even if ``timeout_s``
        is longer: re-reading on another endpoint settles it sooner than waiting does.
        """
        request = txn_request(compares, then, otherwise)
        _, response = await self._calls.call(TXN, request, timeout_s, Effect.ONCE)
        return txn_result(response)

    async def watch(
        self, prefix: str, start_revision: int, *, rest: Rest | None = None
    ) -> AsyncGenerator[WatchBatch, None]:
        """Follow every key under ``prefix`` from ``start_revision`` on (inclusive)."""
        if start_revision < 1:
            raise ValueError(f"a watch starts at revision 1 or later, got {start_revision}")
        interval = Interval.of(prefix, prefix=True)
        cursor = WatchCursor(start_revision - 1, start_revision - 1)
        life: _Life | None = None
        tried: tuple[EtcdEndpoint, ...] = ()
        failures = 0
        refusals = 0
        while not self._calls.closed:
            endpoint = self._calls.rotation.current
            metadata = self._calls.metadata
            try:
                life = await self._same_life(endpoint, interval, cursor.told, life, tried)
                metadata = self._calls.metadata
                stream = WatchStream(
                    endpoint,
                    interval,
                    cursor,
                    life.revision,
                    metadata,
                    progress_is_certain=life.progress_is_certain,
                )
                async with stream:
                    while not self._calls.closed:
                        batch = await stream.next_batch()
                        tried, failures, refusals = (), 0, 0
                        yield batch
                        if rest is not None and stream.busy:
                            break
            except StoreRefused:
                # etcd reports an old token as a missing right, or a missing user: a refusal counts
                # only if it comes with a new token.
                self._calls.reject(metadata)
                refusals += 1
                if refusals > 1:
                    raise
            except (StreamLostError, StoreUnavailable) as lost:
                if self._calls.closed:
                    return
                failures += 1
                tried = self._calls.rotation.leave(endpoint, tried)
                if failures == 1:
                    log.info("the watch leaves store endpoint %s: %s", endpoint.target, lost)
                rounds = failures // len(self._calls.rotation)
                if rounds:
                    await self._calls.pause(rounds)
            else:
                if rest is not None and not self._calls.closed:
                    await rest()

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
        """Renew the lease; return its time to live in seconds, or raise ``LeaseLost``."""
        request = pb.LeaseKeepAliveRequest(ID=lease_id)
        _, response = await self._calls.call(KEEP_ALIVE, request, timeout_s, Effect.IDEMPOTENT)
        if response.TTL <= 0:
            raise LeaseLost(f"lease {lease_id:x} does not exist")
        return float(response.TTL)

    async def lease_revoke(self, lease_id: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Revoke the lease and delete its keys; a lease that is gone counts as success."""
        request = pb.LeaseRevokeRequest(ID=lease_id)
        await self._calls.call(
            REVOKE, request, timeout_s, Effect.IDEMPOTENT, done=Outcome.LEASE_LOST
        )

    async def compact(self, revision: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Compact the history before ``revision``; one already compacted counts as success."""
        request = pb.CompactionRequest(revision=revision)
        await self._calls.call(
            COMPACT, request, timeout_s, Effect.IDEMPOTENT, done=Outcome.COMPACTED
        )

    async def status(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> StoreStatus:
        """Read the status of one reachable endpoint."""
        endpoint, response = await self._calls.call(
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
            db_quota_bytes=response.db_size_quota,
            learner=response.is_learner,
        )

    async def close(self) -> None:
        """Close every connection; watches end, later calls raise ``StoreUnavailable``."""
        await self._calls.close()

    def _endpoints(self, access: Access) -> Sequence[EtcdEndpoint]:
        return endpoints_of(access)

    async def _same_life(
        self,
        endpoint: EtcdEndpoint,
        interval: Interval,
        told: int,
        life: _Life | None,
        tried: tuple[EtcdEndpoint, ...],
    ) -> _Life:
        """Make sure that ``endpoint`` has the history that the watch has seen so far.

        A store that was emptied or restored counts its revisions from an earlier one: a watch on it
        would stay silent until it gets there, or skip what is between. One linearizable read shows
        that, by the cluster's id, its raft term (which never falls) and the revision. It also keeps
        the watch off a member that is frozen or lags behind. ``told``: the newest revision that the
        watch has seen. Raises ``Compacted`` if the history is another one.
        """
        request = pb.RangeRequest(key=interval.start, count_only=True)
        try:
            attempt_s = endpoint.patience.attempt_s
            response = await self._calls.attempt(endpoint, RANGE, request, attempt_s, tried)
            certain = await self._progress_is_certain(endpoint, attempt_s, tried)
        except AttemptError as failed:
            raise failed.verdict() from None
        header = response.header
        if header.revision < told or (
            life is not None
            and (header.cluster_id != life.cluster_id or header.raft_term < life.raft_term)
        ):
            raise Compacted(
                f"the store is not the one that had revision {told}: it was emptied "
                f"or restored, and is at revision {header.revision} now",
                header.revision,
            )
        return _Life(header.cluster_id, header.raft_term, header.revision, certain)

    async def _progress_is_certain(
        self, endpoint: EtcdEndpoint, attempt_s: float, tried: tuple[EtcdEndpoint, ...]
    ) -> bool:
        """Return whether ``endpoint`` reports progress to a watch only after the events.

        It is asked at each stream, as members are replaced by others. One that does not say, as
        behind a proxy, is not relied on, and followed all the same.
        """
        try:
            answer = self._calls.attempt(endpoint, STATUS, pb.StatusRequest(), attempt_s, tried)
            return progress_is_certain((await answer).version)
        except AttemptError as failed:
            log.debug("it does not tell its version: %s", failed)
            return False


@dataclass(frozen=True, slots=True)
class _Life:
    """The identity of a store, its revision, and whether its reports of progress are certain."""

    cluster_id: int
    raft_term: int
    revision: int
    progress_is_certain: bool


def open_store(access: Access, *, first: int = 0, random: Random | None = None) -> Store:
    """Build a client; nothing is sent before its first call. Use it within a running event loop.

    ``first`` is the index of the endpoint to begin with, so that many clients can be spread over
    them, and ``random`` draws what comes after it; without it the client has one of its own. Raises
    ``ConfigError`` if the driver's package is not installed.
    """
    if access.user and not access.tls:
        log.warning(
            "the store's endpoints are not https://: the password of %s goes to them in plain text",
            named("--etcd-user"),
            extra={"event": "password_in_plain_text"},
        )
    if access.driver == "etcd3":
        try:
            # Only here: the package costs memory and start-up time that other drivers should not
            # pay.
            driver = import_module("rdzv.store.etcd3.driver")
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{named('--store-driver')} is etcd3, and the package {error.name} is"
                " not installed: run pip install '.[etcd3]' where Muster's source is, or leave the"
                " driver at http2"
            ) from error
        return cast(Store, driver.Etcd3Store(access, first=first, random=random))
    return EtcdStore(access, first=first, random=random)
