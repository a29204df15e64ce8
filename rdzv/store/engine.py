# SPDX-License-Identifier: Apache-2.0
"""etcd's data model in memory, without input or output: keys, revisions, leases, watchers.

It serves ``memory.MemoryStore`` within a process and ``embedded.EmbeddedServer`` over gRPC.
Nothing here waits; time comes from the clock that is passed in. One thread only.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rdzv.errors import Compacted, StoreRefused
from rdzv.store.interface import KeyValue, WatchEvent
from rdzv.store.intervals import Interval, key_text
from rdzv.store.leases import Lease, LeaseTable

MAX_OPERATIONS = 128
"""In one branch of a transaction; etcd's default of ``--max-txn-ops``."""

Target = Literal["create", "mod", "version", "lease", "value"]
Operator = Literal["=", "!=", "<", ">"]


@dataclass(frozen=True, slots=True)
class Condition:
    """One compare of a transaction, over an interval."""

    interval: Interval
    target: Target
    op: Operator
    operand: int | bytes


@dataclass(frozen=True, slots=True)
class Write:
    """Put one key."""

    key: bytes
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Erase:
    """Delete an interval."""

    interval: Interval


@dataclass(frozen=True, slots=True)
class Read:
    """Read an interval."""

    interval: Interval


Action = Write | Erase | Read
Reply = tuple[KeyValue, ...]
"""What a read found, an erase deleted, or a write replaced."""

_MISSING = KeyValue("", b"", 0, 0, 0, 0)


class MemoryEngine:
    """The store itself. ``clock`` gives seconds that never go back, and ends leases.

    The history is bounded: beyond ``history_limit`` events the older half is compacted away.
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
        self.leases = LeaseTable()
        self._history_limit = history_limit
        self._kvs: dict[bytes, KeyValue] = {}
        self._keys: list[bytes] = []
        self._history: list[tuple[int, bytes, WatchEvent]] = []
        self._watchers: set[Watcher] = set()
        self._live_bytes = 0
        self._past_bytes = 0

    @property
    def size_bytes(self) -> tuple[int, int]:
        """Bytes of keys and values: with the history, and without."""
        return self._live_bytes + self._past_bytes, self._live_bytes

    def read(self, interval: Interval) -> Reply:
        """Read what is there now, in key order; raises ``StoreRefused`` without a key."""
        _check([Read(interval)])
        self.expire_leases()
        return self._read(interval)

    def txn(
        self,
        conditions: Sequence[Condition],
        then: Sequence[Action],
        otherwise: Sequence[Action] = (),
    ) -> tuple[bool, list[Reply]]:
        """Apply one branch as one revision; says which one, and a reply for each action.

        Raises ``LeaseLost`` and ``StoreRefused``, and then has changed nothing.
        """
        self.expire_leases()
        _check(then)
        _check(otherwise)
        holds = all(self._holds(condition) for condition in conditions)
        actions = then if holds else otherwise
        for action in actions:
            if isinstance(action, Write) and action.lease:
                self.leases[action.lease]
        events: list[tuple[bytes, WatchEvent]] = []
        replies = [self._apply(action, events) for action in actions]
        self._commit(events)
        return holds, replies

    def grant(self, lease_id: int, ttl_s: int) -> bool:
        """Start a lease; False if it exists already."""
        self.expire_leases()
        if lease_id in self.leases:
            return False
        if ttl_s <= 0:
            raise StoreRefused(f"a lease needs a time to live of at least 1 s, got {ttl_s}")
        self.leases.add(lease_id, ttl_s, self.clock())
        return True

    def keep_alive(self, lease_id: int) -> float:
        """Renew a lease and return its time to live in seconds; raises ``LeaseLost``."""
        self.expire_leases()
        return self.leases.renew(lease_id, self.clock())

    def revoke(self, lease_id: int) -> None:
        """End a lease and delete its keys as one revision; raises ``LeaseLost``."""
        self.expire_leases()
        self._end(self.leases.remove(lease_id))

    def expire_leases(self, now: float | None = None) -> None:
        """Delete the keys of every lease whose time is over, one revision for each lease."""
        now = self.clock() if now is None else now
        if now < self.leases.next_deadline_s():
            return
        for lease_id in self.leases.due(now):
            self._end(self.leases.remove(lease_id))

    def compact(self, revision: int) -> None:
        """Forget the events before ``revision``; raises ``Compacted`` if they are gone already."""
        if revision > self.revision:
            raise StoreRefused(f"revision {revision} is in the future: now is {self.revision}")
        if revision <= self.compact_revision:
            raise Compacted(f"revision {revision} is compacted already", self.compact_revision)
        self.compact_revision = revision
        cut = self._history_index(revision)
        self._past_bytes -= sum(_size(key, event.kv) for _, key, event in self._history[:cut])
        del self._history[:cut]

    def events(self, interval: Interval, revision: int) -> list[WatchEvent]:
        """Give everything that happened from ``revision`` on; raises ``Compacted``."""
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
        """Follow an interval from ``revision`` on; ``wake`` is called when there is news."""
        watcher = Watcher(self, interval, revision, wake)
        self._watchers.add(watcher)
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        """Stop following."""
        self._watchers.discard(watcher)

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

    def _holds(self, condition: Condition) -> bool:
        found = self._read(condition.interval)
        if not found and condition.target == "value":
            return False
        return all(_compare(condition, kv) for kv in found or (_MISSING,))

    def _apply(self, action: Action, events: list[tuple[bytes, WatchEvent]]) -> Reply:
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

    def _write(self, action: Write, events: list[tuple[bytes, WatchEvent]]) -> Reply:
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
        events.append((key, WatchEvent("put", kv)))
        return () if old is None else (old,)

    def _erase(self, keys: Sequence[bytes], events: list[tuple[bytes, WatchEvent]]) -> None:
        for key in keys:
            old = self._kvs.pop(key)
            del self._keys[bisect_left(self._keys, key)]
            self.leases.detach(old.lease, key)
            self._live_bytes -= _size(key, old)
            tombstone = KeyValue(old.key, b"", 0, self.revision + 1, 0, 0)
            events.append((key, WatchEvent("delete", tombstone)))

    def _end(self, lease: Lease) -> None:
        events: list[tuple[bytes, WatchEvent]] = []
        self._erase(sorted(lease.keys), events)
        self._commit(events)

    def _commit(self, events: list[tuple[bytes, WatchEvent]]) -> None:
        if not events:
            return
        self.revision += 1
        self._history += [(self.revision, key, event) for key, event in events]
        self._past_bytes += sum(_size(key, event.kv) for key, event in events)
        for watcher in tuple(self._watchers):
            watcher.offer(events)
        if len(self._history) > self._history_limit:
            self.compact(self._history[len(self._history) // 2][0])


class Watcher:
    """One reader's place in the history.

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


def _size(key: bytes, kv: KeyValue) -> int:
    return len(key) + len(kv.value)


def _check(actions: Sequence[Action]) -> None:
    """Refuse what etcd refuses, whichever branch will run."""
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


def _compare(condition: Condition, kv: KeyValue) -> bool:
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
