# SPDX-License-Identifier: Apache-2.0
"""The part of etcd that Muster uses, and no more: the contract of every store driver.

Semantics are etcd's. One revision counter for the whole store; a transaction is one revision; a
watch delivers each event once, in order of revision, and never skips one silently. Drivers:
``memory`` (the semantics in one process), ``http2`` (the default), ``etcd3``. ``tests/contract``
holds every driver to this module.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from rdzv.dataclass import dataclass

DEFAULT_TIMEOUT_S = 2.0

Rest = Callable[[], Awaitable[None]]
"""A pause between the streams of a watch. How long it takes is up to the reader."""

WATCH_PROGRESS_S = 2.0


class KeyValue(NamedTuple):
    """One key at one moment. ``lease`` is 0 if the key is attached to none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int


@dataclass(frozen=True, slots=True)
class Compare:
    """One condition of a transaction.

    ``prefix=True`` makes it a range compare: it must hold for *every* key that starts with ``key``;
    if there is none, it is judged as one missing key (so it cannot see deletions). A missing key
    has create and mod revision, version and lease 0; its value matches nothing.
    """

    key: str
    target: Literal["create", "mod", "version", "lease", "value"]
    op: Literal["=", "!=", "<", ">"]
    operand: int | bytes
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class Put:
    """The write of ``value``; ``lease`` 0 detaches the key from any lease."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """The deletion of one key, or of every key that starts with it."""

    key: str
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class Range:
    """The read of one key, or of every key that starts with it, in key order.

    ``revision``: as it was then; 0 is now. A compacted one fails the whole transaction with
    ``Compacted``, even if the branch that names it would not have run.
    """

    key: str
    prefix: bool = False
    revision: int = 0


Operation = Put | Delete | Range
GuardedWrites = tuple[list[Compare], list[Operation]]
"""The compares that a transaction requires, and its operations."""


class RangeResult(NamedTuple):
    """The keys that were read; ``revision`` is the store's at the read."""

    revision: int
    kvs: tuple[KeyValue, ...]


class Page(NamedTuple):
    """Some keys in a row, as of ``revision``; ``more``: others come after them."""

    revision: int
    kvs: tuple[KeyValue, ...]
    more: bool


class TxnResult(NamedTuple):
    """The result of a transaction.

    ``responses`` has, for each operation of the branch that ran, a tuple of key values for a
    ``Range``, the number of deleted keys for a ``Delete``, and None for a ``Put``.
    """

    succeeded: bool
    revision: int
    responses: tuple[tuple[KeyValue, ...] | int | None, ...]


class WatchEvent(NamedTuple):
    """One change of a key.

    ``kv`` of a deletion has an empty value and the deletion's revision as mod revision.
    """

    kind: Literal["put", "delete"]
    kv: KeyValue


class WatchBatch(NamedTuple):
    """Some events, with which everything up to ``revision`` has been delivered.

    A batch without events is a proof of life: the stream works and nothing has changed. An idle
    watch yields one at least every ``WATCH_PROGRESS_S``.
    """

    revision: int
    events: tuple[WatchEvent, ...]


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The status of one endpoint.

    ``errors``: alarms, and a missing leader. ``db_quota_bytes``: the size at which it takes no more
    writes; 0 if it does not say. ``learner``: it does not vote yet, and answers no linearizable
    read.
    """

    endpoint: str
    version: str
    cluster_id: int
    member_id: int
    leader_id: int
    revision: int
    db_size_bytes: int
    db_size_in_use_bytes: int
    errors: tuple[str, ...] = ()
    db_quota_bytes: int = 0
    learner: bool = False

    @property
    def full(self) -> bool:
        """Whether the store takes no writes, for want of space."""
        return any("NOSPACE" in error for error in self.errors)


class Store(Protocol):
    """A store driver.

    Every call has a deadline (``timeout_s``) that covers all attempts and endpoints. Errors:
    ``StoreUnavailable`` (not applied), ``StoreAmbiguous`` (a write that may have been applied),
    ``StoreRefused`` (not applied), but ``StoreFull`` (no space; a write may have been applied),
    and those named at each call. Reads never raise ``StoreAmbiguous``.
    """

    async def range(
        self, key: str, *, prefix: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> RangeResult:
        """Read one key, or all with a prefix, linearizably."""
        ...

    async def page(
        self,
        prefix: str,
        *,
        limit: int,
        after: str = "",
        revision: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Page:
        """Read the first ``limit`` keys under ``prefix`` that come after the key ``after``.

        ``revision``: as it was then, which the following pages of one read ask for; 0 is now,
        linearizably. An attempt may take half of ``timeout_s``, however fast the connection has
        been, as a page is more than other answers. Raises ``Compacted`` if that revision is gone,
        and ``StoreRefused`` if it never was.
        """
        ...

    async def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> TxnResult:
        """Apply ``then`` if every compare holds, else ``otherwise``; atomically.

        Not repeated by the driver once it may have been sent: the caller settles an ambiguous
        outcome. Raises ``LeaseLost`` if a put names a lease that does not exist.
        """
        ...

    def watch(
        self, prefix: str, start_revision: int, *, rest: Rest | None = None
    ) -> AsyncGenerator[WatchBatch, None]:
        """Follow every key under ``prefix`` from ``start_revision`` on (inclusive).

        Survives the loss of an endpoint by resuming after what has certainly been delivered, for as
        long as it takes. Raises ``Compacted`` if that revision is gone, if the store is no longer
        the one that had it (emptied, or restored from a copy), or if it sends events that it had
        reported as delivered; ``StoreRefused`` without rights. Close it with ``aclose()``;
        cancelling the wait for a batch closes it too.

        ``rest``: for a reader of many events, for whom each message costs more than what it says. A
        driver may await it while many revisions come, and then read what came meanwhile at once.
        """
        ...

    async def lease_grant(
        self, lease_id: int, ttl_s: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Grant the lease ``lease_id``, chosen by the caller; one that exists counts as success."""
        ...

    async def lease_keep_alive(
        self, lease_id: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> float:
        """Renew the lease; return its time to live in seconds, or raise ``LeaseLost``."""
        ...

    async def lease_revoke(self, lease_id: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Revoke the lease and delete its keys; a lease that is gone counts as success."""
        ...

    async def compact(self, revision: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Compact the history before ``revision``; one already compacted counts as success."""
        ...

    async def status(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> StoreStatus:
        """Read the status of one reachable endpoint."""
        ...

    async def close(self) -> None:
        """Close every connection; watches end."""
        ...


def key_bytes(key: str) -> bytes:
    """Encode a key; the reverse of ``key_text`` for every key, also one that is no UTF-8."""
    return key.encode("utf-8", "surrogateescape")


def key_text(key: bytes) -> str:
    """Decode a key; never raise, as a foreign key that is no UTF-8 must not end a watch."""
    return key.decode("utf-8", "surrogateescape")


@dataclass(frozen=True, slots=True)
class Interval:
    """Keys from ``start`` up to, not including, ``end``.

    An empty ``end`` means the one key ``start``; ``b"\\0"`` means no upper bound.
    """

    start: bytes
    end: bytes = b""

    @classmethod
    def of(cls, key: str, *, prefix: bool) -> Interval:
        """Return the interval of one key, or of all that start with it; empty: the whole store."""
        start = key_bytes(key)
        if not prefix:
            return cls(start)
        if not start:
            return cls(b"\0", b"\0")
        stem = start.rstrip(b"\xff")
        return cls(start, stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0")

    @classmethod
    def after(cls, key: str, prefix: str) -> Interval:
        """Return the interval of keys under ``prefix`` after ``key``; of all if that is empty."""
        whole = cls.of(prefix, prefix=True)
        return cls(key_bytes(key) + b"\0", whole.end) if key else whole

    @property
    def single(self) -> bool:
        """Whether this is one key."""
        return not self.end

    def holds(self, key: bytes) -> bool:
        """Return whether ``key`` is within."""
        end = self.end
        if not end:
            return key == self.start
        return key >= self.start and (end == b"\0" or key < end)
