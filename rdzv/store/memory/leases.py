# SPDX-License-Identifier: Apache-2.0
"""The leases of the memory engine: their deadlines, and the keys attached to each."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from rdzv.errors import LeaseLost


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
