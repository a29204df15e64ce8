# SPDX-License-Identifier: Apache-2.0
"""One reader's place in the history of the memory engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rdzv.store.interface import WatchEvent
from rdzv.store.intervals import Interval

if TYPE_CHECKING:
    from rdzv.store.memory.engine import MemoryEngine


class Watcher:
    """Gives the news of one interval, in order and without a gap.

    News is kept for it while it keeps up; one that is slow reads the history again, so that
    what waits for it stays bounded, and may find it compacted.
    """

    PENDING_LIMIT = 4096

    def __init__(
        self, engine: MemoryEngine, interval: Interval, revision: int, wake: Callable[[], None]
    ) -> None:
        self.interval = interval
        self.next_revision = revision
        self._engine = engine
        self._wake = wake
        self._pending: list[WatchEvent] = []
        self._behind = True

    def offer(self, events: Sequence[tuple[bytes, WatchEvent]]) -> None:
        """Take the events of one revision from the engine."""
        news = [event for key, event in events if self.interval.holds(key)]
        if not news:
            return
        if not self._behind:
            self._pending += news
            if len(self._pending) > self.PENDING_LIMIT:
                self._pending.clear()
                self._behind = True
        self._wake()

    def take(self) -> tuple[int, tuple[WatchEvent, ...]]:
        """Give all news, in order, and the revision up to which it reaches.

        Raises ``Compacted`` for a watcher that was behind.
        """
        engine = self._engine
        engine.expire_leases()
        if self._behind:
            news = tuple(engine.events(self.interval, self.next_revision))
            self._behind = self.next_revision > engine.revision + 1
        else:
            news = tuple(self._pending)
            self._pending.clear()
        self.next_revision = max(self.next_revision, engine.revision + 1)
        return engine.revision, news

    def close(self) -> None:
        """Stop following."""
        self._engine.unwatch(self)
