# SPDX-License-Identifier: Apache-2.0
"""The parts of the memory engine's transactions, what etcd would refuse in one, and its leases."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rdzv.errors import LeaseLost, StoreRefused
from rdzv.store.interface import Interval, KeyValue, key_text

MAX_OPERATIONS = 128
"""Bound on the operations in one branch of a transaction: etcd's default of ``--max-txn-ops``."""

Target = Literal["create", "mod", "version", "lease", "value"]
Operator = Literal["=", "!=", "<", ">"]

_MISSING = KeyValue("", b"", 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Condition:
    """One compare of a transaction, over an interval."""

    interval: Interval
    target: Target
    op: Operator
    operand: int | bytes


@dataclass(frozen=True, slots=True)
class Write:
    """The write of one key."""

    key: bytes
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Erase:
    """The deletion of an interval."""

    interval: Interval


@dataclass(frozen=True, slots=True)
class Read:
    """The read of an interval, as of ``revision`` or, with 0, as it is now."""

    interval: Interval
    revision: int = 0


Action = Write | Erase | Read
Reply = tuple[KeyValue, ...]
"""The keys that a read found, an erase deleted, or a write replaced."""


def check(actions: Sequence[Action]) -> None:
    """Raise ``StoreRefused`` for what etcd refuses, whichever branch will run."""
    if len(actions) > MAX_OPERATIONS:
        raise StoreRefused(f"{len(actions)} operations in a branch, at most {MAX_OPERATIONS}")
    erased = [action.interval for action in actions if isinstance(action, Erase)]
    written: set[bytes] = set()
    for action in actions:
        key = action.key if isinstance(action, Write) else action.interval.start
        if not key:
            raise StoreRefused("an operation without a key")
        if isinstance(action, Write):
            if key in written or any(interval.holds(key) for interval in erased):
                raise StoreRefused(f"key {key_text(key)} is written twice in one transaction")
            written.add(key)


def writes(then: Sequence[Action], otherwise: Sequence[Action]) -> bool:
    """Return whether a transaction needs space: etcd asks before it judges the compares."""
    return any(isinstance(action, Write) for action in (*then, *otherwise))


def holds(condition: Condition, kvs: Reply) -> bool:
    """Judge a condition by the keys found in its interval; no key counts as one of all zeros."""
    if not kvs and condition.target == "value":
        return False
    return all(_holds_for(condition, kv) for kv in kvs or (_MISSING,))


def _holds_for(condition: Condition, kv: KeyValue) -> bool:
    actual: int | bytes
    match condition.target:
        case "create":
            actual = kv.create_revision
        case "mod":
            actual = kv.mod_revision
        case "version":
            actual = kv.version
        case "lease":
            actual = kv.lease
        case "value":
            actual = kv.value
    operand = condition.operand
    if isinstance(actual, bytes) != isinstance(operand, bytes):
        raise StoreRefused(f"cannot compare {condition.target} with {operand!r}")
    match condition.op:
        case "=":
            return actual == operand
        case "!=":
            return actual != operand
        case "<":
            return actual < operand  # type: ignore[operator]
        case ">":
            return actual > operand  # type: ignore[operator]


@dataclass(slots=True)
class Lease:
    """One lease; ``deadline_s`` is on the engine's clock."""

    ttl_s: int
    deadline_s: float
    keys: set[bytes] = field(default_factory=set)


class LeaseTable:
    """All leases of one engine. It deletes no key itself: ``due`` yields the expired leases."""

    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        # An entry may be earlier than its lease's deadline: it is corrected when it comes up.
        self._queue: list[tuple[float, int]] = []

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._leases

    def __iter__(self) -> Iterator[int]:
        return iter(self._leases)

    def __getitem__(self, lease_id: int) -> Lease:
        try:
            return self._leases[lease_id]
        except KeyError:
            raise LeaseLost(f"lease {lease_id:x} does not exist") from None

    def require(self, lease_id: int) -> None:
        """Raise ``LeaseLost`` if there is no such lease."""
        self[lease_id]

    def add(self, lease_id: int, ttl_s: int, now: float) -> None:
        """Add a lease that does not exist yet."""
        self._leases[lease_id] = Lease(ttl_s, now + ttl_s)
        heapq.heappush(self._queue, (now + ttl_s, lease_id))

    def renew(self, lease_id: int, now: float) -> float:
        """Restart the time to live and return it; raise ``LeaseLost`` if there is no such lease."""
        lease = self[lease_id]
        lease.deadline_s = now + lease.ttl_s
        return float(lease.ttl_s)

    def remove(self, lease_id: int) -> Lease:
        """Remove a lease and return it; raise ``LeaseLost`` if there is none."""
        lease = self[lease_id]
        del self._leases[lease_id]
        return lease

    def attach(self, lease_id: int, key: bytes) -> None:
        """Attach ``key`` to a lease; 0 is none."""
        if lease_id:
            self[lease_id].keys.add(key)

    def detach(self, lease_id: int, key: bytes) -> None:
        """Detach ``key`` from the lease, which may have ended already; 0 is none."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.keys.discard(key)

    def next_deadline_s(self) -> float:
        """Return a time before which no lease ends; infinite without leases."""
        return self._queue[0][0] if self._queue else float("inf")

    def due(self, now: float) -> Iterator[int]:
        """Yield every lease that has expired at ``now``; the caller removes each as it comes."""
        while self._queue and self._queue[0][0] <= now:
            _, lease_id = heapq.heappop(self._queue)
            lease = self._leases.get(lease_id)
            if lease is None:
                continue
            if lease.deadline_s <= now:
                yield lease_id
            else:
                heapq.heappush(self._queue, (lease.deadline_s, lease_id))
