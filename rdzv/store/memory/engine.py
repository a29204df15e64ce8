# SPDX-License-Identifier: Apache-2.0
"""etcd's data model in memory, without input or output: keys, revisions, leases, watchers.

It serves ``client.MemoryStore`` within a process and ``server.EmbeddedServer`` over gRPC. Nothing
here waits; time comes from the clock that is passed in. One thread only.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

from rdzv.errors import Compacted, StoreFull, StoreRefused
from rdzv.store.interface import Interval, KeyValue, WatchEvent, key_bytes, key_text
from rdzv.store.memory.actions import (
    Action,
    Condition,
    Lease,
    LeaseTable,
    Read,
    Reply,
    Write,
    check,
    holds,
    writes,
)

VERSION = "3.6.0+memory"

Change = tuple[bytes, WatchEvent, KeyValue | None]
"""The change of a key, and its value before."""

NO_SPACE = "etcdserver: mvcc: database space exceeded"
"""The error of etcd for what it refuses while its quota is used up."""


class MemoryEngine:
    """The store itself. ``clock`` returns seconds that never go back, and ends leases.

    The history is bounded: beyond ``history_limit`` events the older half is compacted away.
    ``full``: it has etcd's alarm NOSPACE, and refuses transactions with a put in either branch, and
    new leases. Reads, watches, renewals, expiries and deletions go on.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        cluster_id: int = 1,
        history_limit: int = 100_000,
    ) -> None:
        self.clock = clock
        self.cluster_id = cluster_id
        self.revision = 1
        self.compact_revision = 0
        self.full = False
        self.leases = LeaseTable()
        self._history_limit = history_limit
        self._kvs: dict[bytes, KeyValue] = {}
        self._keys: list[bytes] = []
        self._history: list[tuple[int, bytes, WatchEvent, KeyValue | None]] = []
        # In order of their arrival: a simulation must not depend on memory addresses.
        self._watchers: dict[Watcher, None] = {}
        self._live_bytes = 0
        self._past_bytes = 0

    @property
    def alarms(self) -> tuple[str, ...]:
        """The errors of its status, as etcd words them."""
        return ("memberID:1 alarm:NOSPACE ",) if self.full else ()

    @property
    def size_bytes(self) -> tuple[int, int]:
        """Bytes of keys and values: with the history, and without."""
        return self._live_bytes + self._past_bytes, self._live_bytes

    def read(self, interval: Interval, revision: int = 0) -> Reply:
        """Read what is there now, or was at ``revision``, in key order.

        Raises ``StoreRefused`` without a key, and what ``txn`` raises.
        """
        check([Read(interval)])
        self.expire_leases()
        self._check_revision(revision)
        return self._read_at(interval, revision)

    def txn(
        self,
        conditions: Sequence[Condition],
        then: Sequence[Action],
        otherwise: Sequence[Action] = (),
    ) -> tuple[bool, list[Reply]]:
        """Apply one branch as one revision; return whether it is ``then``, and a reply per action.

        Raises ``LeaseLost``, ``Compacted`` and ``StoreRefused``, and then has changed nothing.
        """
        self.expire_leases()
        if self.full and writes(then, otherwise):
            raise StoreFull(NO_SPACE)
        check(then)
        check(otherwise)
        for action in (*then, *otherwise):
            if isinstance(action, Read):
                self._check_revision(action.revision)
        succeeded = all(
            holds(condition, self._read(condition.interval)) for condition in conditions
        )
        actions = then if succeeded else otherwise
        for action in actions:
            if isinstance(action, Write) and action.lease:
                self.leases.require(action.lease)
        past = {
            index: self._read_at(action.interval, action.revision)
            for index, action in enumerate(actions)
            if isinstance(action, Read) and action.revision
        }
        events: list[Change] = []
        replies = [
            past[index] if index in past else self._apply(action, events)
            for index, action in enumerate(actions)
        ]
        self._commit(events)
        return succeeded, replies

    def grant(self, lease_id: int, ttl_s: int) -> bool:
        """Grant a lease; return False if it exists already."""
        self.expire_leases()
        if self.full:
            raise StoreFull(NO_SPACE)
        if lease_id in self.leases:
            return False
        if ttl_s <= 0:
            raise StoreRefused(f"a lease needs a time to live of at least 1 s, got {ttl_s}")
        self.leases.add(lease_id, ttl_s, self.clock())
        return True

    def keep_alive(self, lease_id: int) -> float:
        """Renew a lease and return its time to live in seconds, or raise ``LeaseLost``."""
        self.expire_leases()
        return self.leases.renew(lease_id, self.clock())

    def revoke(self, lease_id: int) -> None:
        """Revoke a lease and delete its keys as one revision; raise ``LeaseLost`` if it is gone."""
        self.expire_leases()
        self._end(self.leases.remove(lease_id))

    def expire_leases(self, now: float | None = None) -> None:
        """Delete the keys of every lease that has expired, one revision for each lease."""
        now = self.clock() if now is None else now
        if now < self.leases.next_deadline_s():
            return
        for lease_id in self.leases.due(now):
            self._end(self.leases.remove(lease_id))

    def compact(self, revision: int) -> None:
        """Compact the events before ``revision``; raise ``Compacted`` if they are gone already."""
        if revision > self.revision:
            raise StoreRefused(f"revision {revision} is in the future: now is {self.revision}")
        if revision <= self.compact_revision:
            raise Compacted(f"revision {revision} is compacted already", self.compact_revision)
        self.compact_revision = revision
        cut = self._history_index(revision)
        self._past_bytes -= sum(_size(key, event.kv) for _, key, event, _ in self._history[:cut])
        del self._history[:cut]

    def events(self, interval: Interval, revision: int) -> list[WatchEvent]:
        """Return all events from ``revision`` on; raise ``Compacted`` if some are gone."""
        if revision < self.compact_revision:
            raise Compacted(
                f"the history from revision {revision} on was compacted at {self.compact_revision}",
                self.compact_revision,
            )
        past = self._history
        return [
            past[index][2]
            for index in range(self._history_index(revision), len(past))
            if interval.holds(past[index][1])
        ]

    def watch(self, interval: Interval, revision: int, wake: Callable[[], None]) -> Watcher:
        """Follow an interval from ``revision`` on; ``wake`` is called when there are events."""
        watcher = Watcher(self, interval, revision, wake)
        self._watchers[watcher] = None
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        """Remove a watcher."""
        self._watchers.pop(watcher, None)

    def _history_index(self, revision: int) -> int:
        return bisect_left(self._history, revision, key=lambda entry: entry[0])

    def _bounds(self, interval: Interval) -> tuple[int, int]:
        low = bisect_left(self._keys, interval.start)
        if interval.end == b"\0":
            return low, len(self._keys)
        return low, max(low, bisect_left(self._keys, interval.end))

    def _read(self, interval: Interval) -> Reply:
        if interval.single:
            kv = self._kvs.get(interval.start)
            return () if kv is None else (kv,)
        low, high = self._bounds(interval)
        return tuple(self._kvs[key] for key in self._keys[low:high])

    def _check_revision(self, revision: int) -> None:
        if revision > self.revision:
            raise StoreRefused(f"revision {revision} is in the future: now is {self.revision}")
        if revision and revision < self.compact_revision:
            raise Compacted(
                f"revision {revision} was compacted at {self.compact_revision}",
                self.compact_revision,
            )

    def _read_at(self, interval: Interval, revision: int) -> Reply:
        """Read an interval, and undo the changes since ``revision``."""
        now = self._read(interval)
        if not revision:
            return now
        then: dict[bytes, KeyValue | None] = {key_bytes(kv.key): kv for kv in now}
        for index in range(len(self._history) - 1, self._history_index(revision + 1) - 1, -1):
            _, key, _, before = self._history[index]
            if interval.holds(key):
                then[key] = before
        return tuple(kv for _, kv in sorted(then.items()) if kv is not None)

    def _apply(self, action: Action, events: list[Change]) -> Reply:
        if isinstance(action, Read):
            return self._read(action.interval)
        if isinstance(action, Write):
            return self._write(action, events)
        deleted = self._read(action.interval)
        low, high = self._bounds(action.interval)
        keys = [action.interval.start] if action.interval.single else self._keys[low:high]
        if deleted:
            self._erase(keys, events)
        return deleted

    def _write(self, action: Write, events: list[Change]) -> Reply:
        key, revision = action.key, self.revision + 1
        old = self._kvs.get(key)
        if old is None:
            insort(self._keys, key)
            kv = KeyValue(key_text(key), action.value, revision, revision, 1, action.lease)
        else:
            kv = KeyValue(
                old.key, action.value, old.create_revision, revision, old.version + 1, action.lease
            )
            if old.lease != action.lease:
                self.leases.detach(old.lease, key)
            self._live_bytes -= _size(key, old)
        self.leases.attach(action.lease, key)
        self._kvs[key] = kv
        self._live_bytes += _size(key, kv)
        events.append((key, WatchEvent("put", kv), old))
        return () if old is None else (old,)

    def _erase(self, keys: Sequence[bytes], events: list[Change]) -> None:
        for key in keys:
            old = self._kvs.pop(key)
            del self._keys[bisect_left(self._keys, key)]
            self.leases.detach(old.lease, key)
            self._live_bytes -= _size(key, old)
            tombstone = KeyValue(old.key, b"", 0, self.revision + 1, 0, 0)
            events.append((key, WatchEvent("delete", tombstone), old))

    def _end(self, lease: Lease) -> None:
        events: list[Change] = []
        self._erase(sorted(lease.keys), events)
        self._commit(events)

    def _commit(self, events: list[Change]) -> None:
        if not events:
            return
        self.revision += 1
        self._history += [(self.revision, *change) for change in events]
        self._past_bytes += sum(_size(key, event.kv) for key, event, _ in events)
        for watcher in tuple(self._watchers):
            watcher.offer([(key, event) for key, event, _ in events])
        if len(self._history) > self._history_limit:
            self.compact(self._history[len(self._history) // 2][0])


def _size(key: bytes, kv: KeyValue) -> int:
    return len(key) + len(kv.value)


class Watcher:
    """The events of one interval, in order and without a gap.

    They are kept for it while it keeps up; a slow watcher reads the history again, so that what
    waits for it stays bounded, and may find it compacted.
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
        """Take in the events of one revision from the engine."""
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
        """Return all new events, in order, and the revision up to which they reach.

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
        """Remove this watcher from the engine."""
        self._engine.unwatch(self)
