# SPDX-License-Identifier: Apache-2.0
"""Items of several sources in the order of their times, within bounds of memory and delay. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")

HOLD_S = 0.5
"""Time for which an item waits for an earlier one of another source. Longer: a follower lags.
Shorter: lines of a slow connection come after later ones of others."""

BUDGET_BYTES = 16 * 2**20
"""Memory for items that wait, of all sources together; each may hold one item beyond its part."""


@dataclass(slots=True)
class _Queue(Generic[T]):
    """One source."""

    items: deque[tuple[int, float, int, T]] = field(default_factory=deque)
    """Time of the item, time of its arrival, bytes, the item."""
    size: int = 0
    open: bool = True


class Merge(Generic[T]):
    """A merge of sources, each of which is in order of time.

    The earliest item is due when every other source has one, too, has ended, or has been empty for
    ``hold_s``, or when the item itself has waited that long.
    """

    def __init__(self, hold_s: float = HOLD_S, budget_bytes: int = BUDGET_BYTES) -> None:
        self._hold_s = hold_s
        self._budget_bytes = budget_bytes
        self._queues: dict[int, _Queue[T]] = {}
        self._heads: list[tuple[int, int, int]] = []
        self._empty: dict[int, float] = {}
        """Open sources without an item, with the time since when; the last one is the newest."""
        self._next, self._order = 0, 0

    def open(self, now_s: float) -> int:
        """Add a source; return its number."""
        self._next += 1
        self._queues[self._next] = _Queue()
        self._empty[self._next] = now_s
        return self._next

    def has_room(self, source: int) -> bool:
        """Return whether the source may put another item."""
        queue = self._queues[source]
        return not queue.items or queue.size < self._budget_bytes / len(self._queues)

    def put(self, source: int, at_unix_ns: int, item: T, size: int, now_s: float) -> None:
        """Take in an item of ``size`` bytes that was written at ``at_unix_ns``."""
        queue = self._queues[source]
        queue.items.append((at_unix_ns, now_s, size, item))
        queue.size += size
        if len(queue.items) == 1:
            self._empty.pop(source, None)
            self._push(source, at_unix_ns)

    def close(self, source: int) -> None:
        """Note that a source has ended; what it has put stays."""
        self._empty.pop(source, None)
        queue = self._queues[source]
        queue.open = False
        if not queue.items:
            del self._queues[source]

    def take(self, now_s: float) -> T | None:
        """Return the next item that is due; None if none is."""
        if self.due_s() > now_s:
            return None
        _, _, source = heappop(self._heads)
        queue = self._queues[source]
        _, _, size, item = queue.items.popleft()
        queue.size -= size
        if queue.items:
            self._push(source, queue.items[0][0])
        elif queue.open:
            self._empty[source] = now_s
        else:
            del self._queues[source]
        return item

    def due_s(self) -> float:
        """Return the time at which the next item is due; infinity if there is none."""
        if not self._heads:
            return math.inf
        if not self._empty:
            return -math.inf
        _, arrived_s, _, _ = self._queues[self._heads[0][2]].items[0]
        newest_s = next(reversed(self._empty.values()))
        return min(arrived_s, newest_s) + self._hold_s

    def _push(self, source: int, at_unix_ns: int) -> None:
        self._order += 1
        heappush(self._heads, (at_unix_ns, self._order, source))
