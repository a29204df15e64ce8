# SPDX-License-Identifier: Apache-2.0
"""The cache of a run's cells, filled by the watch, by reads and by this sidecar's own writes.

Own writes are in it at once, before the watch has brought them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from launcher_shim.c10d.values.cell import ABSENT, Cell, Floor, Part
from rdzv.keys import RunKeys
from rdzv.mirror import Mirror
from rdzv.store import Compare, KeyValue, Range, WatchEvent


class Sum:
    """The sum of one counter at the newest change of one addend, taken from the watch.

    Each adder has its addend in a store key of its own. Reading all of them with each addition
    would cost N² reads if N agents add at once, as at torch's exit barrier. The watch brings every
    change in the order of revisions, so the sum is known once the own addition has come.
    """

    def __init__(self, revision: int) -> None:
        self._revision = revision
        self._number: int | None = None
        self._noted = asyncio.Event()

    def note(self, revision: int, number: int | None) -> None:
        """Note the sum at ``revision``; None if it is not known."""
        if revision > self._revision:
            self._revision, self._number = revision, number
            self._noted.set()

    async def shown_at(self, revision: int) -> int | None:
        """Wait until the watch has shown ``revision``; return the sum, or None if not known."""
        while self._revision < revision:
            self._noted.clear()
            await self._noted.wait()
        return self._number if self._revision == revision else None


class Cells:
    """All cells of one run, which follow ``mirror`` until ``close``.

    ``floor`` begins anew if the store does. ``on_present`` is called with each key whose value was
    created or updated, ``on_pushed`` with the key of a queue for each new element, ``on_changed``
    before any change of the cache.
    """

    def __init__(
        self,
        keys: RunKeys,
        mirror: Mirror,
        floor: Floor,
        on_present: Callable[[bytes], None],
        on_pushed: Callable[[bytes], None],
        on_changed: Callable[[], None],
    ) -> None:
        self.keys = keys
        self._mirror = mirror
        self._floor = floor
        self._on_present = on_present
        self._on_pushed = on_pushed
        self._on_changed = on_changed
        self._cells: dict[bytes, Cell] = {}
        self.values: dict[bytes, tuple[bytes, int]] = {}
        """Every cached value, and the revision since which it has been valid. Read-only."""
        self._sums: dict[str, Sum] = {}
        """The sums that are waited for, by the store key of the addend."""
        self._absent: deque[tuple[int, bytes]] = deque()
        self._applied = 0
        self._relists = mirror.relists
        self._begin()
        self.close = mirror.subscribe(self._apply)

    def value(self, key: bytes) -> bytes | None:
        """Return the cached value of ``key``; None if there is none."""
        entry = self.values.get(key)
        return entry[0] if entry is not None else None

    def value_revision(self, key: bytes) -> int:
        """Return the revision since which ``key`` has had its value; 0 if none is cached."""
        entry = self.values.get(key)
        return entry[1] if entry is not None else 0

    def exists(self, key: bytes) -> bool:
        """Return whether the cache has a value or an element of ``key``."""
        if key in self.values:
            return True
        cell = self._cells.get(key)
        return cell is not None and bool(cell.queue())

    def cell(self, key: bytes) -> Cell:
        """Return the cell of ``key``; an empty one if nothing of it is cached."""
        return self._cells.get(key) or Cell()

    def existing(self) -> Iterator[bytes]:
        """Return every key with a value (queues do not count)."""
        return iter(tuple(self.values))

    def reads(self, key: bytes) -> list[Range]:
        """Return the reads of all of ``key``: its value, its addends, its queue."""
        return [
            Range(self.keys.value(key)),
            Range(self.keys.addends(key), prefix=True),
            Range(self.keys.queue(key), prefix=True),
        ]

    def unchanged(self, key: bytes) -> tuple[Compare, ...]:
        """Return compares that hold while the value of ``key`` is the cached one.

        The range compare does not see deletions, but addends are deleted only together with a
        write of the value itself.
        """
        cell = self.cell(key)
        return (
            Compare(self.keys.value(key), "mod", "=", cell.base.compared),
            Compare(self.keys.addends(key), "mod", "<", cell.newest_revision() + 1, prefix=True),
        )

    @contextmanager
    def awaited_sum(self, key: bytes, adder: str) -> Iterator[Sum]:
        """Note the sum at each change of one addend until the end of the block."""
        addend, known = self.keys.addend(key, adder), self.cell(key).addends.get(adder, ABSENT)
        awaited = self._sums[addend] = Sum(known.mod_revision)
        try:
            yield awaited
        finally:
            if self._sums.get(addend) is awaited:
                del self._sums[addend]

    def _begin(self) -> None:
        """Cache what the mirror has: at first, and after the store was restored or emptied."""
        self._floor.begin_anew()
        self._on_changed()
        self._cells.clear()
        self.values.clear()
        self._absent.clear()
        self._applied = 0
        self.learn(self._mirror.under(self.keys.prefix))
        self._applied = self._mirror.revision

    def _apply(self, events: Sequence[WatchEvent]) -> None:
        """Apply one batch of the mirror, which is complete up to its revision."""
        prefix, revision = self.keys.prefix, self._mirror.revision
        if revision < self._applied:
            self._begin()
        relisted = self._relists != self._mirror.relists
        self._relists = self._mirror.relists
        for event in events:
            kv, present = event.kv, event.kind == "put"
            if kv.key.startswith(prefix):
                taken = self._take(kv, present=present)
                if present and (awaited := self._sums.get(kv.key)) is not None:
                    # After a relist, or if a later change is cached, the sum at that revision is
                    # not known.
                    exact = None if relisted else taken
                    awaited.note(kv.mod_revision, exact.total() if exact is not None else None)
        self._applied = revision
        gone: set[bytes] = set()
        while self._absent and self._absent[0][0] <= revision:
            gone.add(self._absent.popleft()[1])
        for key in gone:
            self._forget(key, revision)

    def learn(self, kvs: Sequence[KeyValue]) -> None:
        """Cache keys that a read or an own write has shown.

        The answer may be older than the watch position: keys up to there are skipped, as they are
        cached already or have been deleted since.
        """
        for kv in kvs:
            if kv.mod_revision > self._applied:
                self._take(kv, present=True)

    def learn_cell(self, key: bytes, revision: int, kvs: Sequence[KeyValue]) -> Cell:
        """Cache the answer of ``reads`` at ``revision``; return the cell."""
        there = {kv.key for kv in kvs}
        self.learn(kvs)
        for name in self._names(key):
            if name not in there:
                self.learn_absent(name, revision)
        self._settle(key, value=revision, queue=revision)
        return self.cell(key)

    def learn_value(self, key: bytes, value: bytes, revision: int) -> None:
        """Cache that ``key`` was set at ``revision``, which deleted its addends."""
        for adder in tuple(self.cell(key).addends):
            self.learn_absent(self.keys.addend(key, adder), revision)
        self.learn([KeyValue(self.keys.value(key), value, revision, revision, 1, 0)])
        self._settle(key, value=revision)

    def learn_gone(self, key: bytes, revision: int) -> None:
        """Cache that ``key`` was deleted at ``revision``, with its addends and its queue."""
        self.learn_absent(self.keys.value(key), revision)
        self.learn_cell(key, revision, ())

    def learn_absent(self, key: str, revision: int) -> None:
        """Cache that a key of the store was absent at ``revision``."""
        if revision > self._applied:
            self._take(KeyValue(key, b"", 0, revision, 0, 0), present=False)

    def _settle(self, key: bytes, *, value: int, queue: int = 0) -> None:
        """Note up to which revisions the value and the queue of ``key`` are complete."""
        cell = self._cells.get(key)
        if cell is not None:
            cell.value_settled = max(cell.value_settled, value)
            cell.queue_settled = max(cell.queue_settled, queue)

    def _names(self, key: bytes) -> list[str]:
        """Return the store's keys of ``key`` that are cached."""
        cell = self.cell(key)
        names = [self.keys.value(key)] if cell.base is not ABSENT else []
        names += [self.keys.addend(key, adder) for adder in cell.addends]
        names += [self.keys.element(key, element) for element in cell.elements]
        return names

    def _take(self, kv: KeyValue, *, present: bool) -> Cell | None:
        """Cache one key of the store; return its cell, or None if that changes nothing."""
        section, key, item = self.keys.split(kv.key)
        if section not in ("kv", "sum", "queue"):
            return None
        cell = self._cells.setdefault(key, Cell())
        part = self._part(cell, section, item)
        settled = cell.queue_settled if section == "queue" else cell.value_settled
        if max(part.mod_revision, settled) >= kv.mod_revision:
            return None
        self._on_changed()
        part = Part(kv.value if present else None, kv.mod_revision, kv.create_revision)
        if section == "kv":
            cell.base = part
        elif section == "sum":
            cell.put_addend(item, part)
        else:
            cell.elements[item] = part
        if not present:
            self._absent.append((kv.mod_revision, key))
        self._revalue(key, cell)
        if present:
            (self._on_pushed if section == "queue" else self._on_present)(key)
        return cell

    @staticmethod
    def _part(cell: Cell, section: str, item: str) -> Part:
        if section == "kv":
            return cell.base
        parts = cell.addends if section == "sum" else cell.elements
        return parts.get(item, ABSENT)

    def _revalue(self, key: bytes, cell: Cell) -> None:
        value = cell.value()
        if value is None:
            self.values.pop(key, None)
        else:
            self.values[key] = value, cell.value_revision()

    def _forget(self, key: bytes, revision: int) -> None:
        """Drop parts whose deletion the watch has passed: nothing older can come back."""
        cell = self._cells.get(key)
        if cell is None:
            return
        cell.addends = _without_absent(cell.addends, revision)
        cell.elements = _without_absent(cell.elements, revision)
        gone = cell.base.value is None and cell.base.mod_revision <= revision
        if gone and not cell.addends and not cell.elements:
            del self._cells[key]


def _without_absent(parts: dict[str, Part], revision: int) -> dict[str, Part]:
    return {
        name: part
        for name, part in parts.items()
        if part.value is not None or part.mod_revision > revision
    }
