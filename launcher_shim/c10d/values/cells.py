# SPDX-License-Identifier: Apache-2.0
"""What a run's launchers have stored, as the mirror and this sidecar's own writes show it.

Own writes show at once, although the watch has not brought them yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from launcher_shim.c10d.values.cell import ABSENT, Cell, Part
from launcher_shim.c10d.values.sums import Sums
from rdzv.keys import RunKeys
from rdzv.store import Compare, KeyValue, Range, WatchEvent


class Cells:
    """All cells of one run.

    ``on_present`` is called with each key whose value was created or updated, ``on_pushed`` with
    the key of a queue for each element that has come. ``on_changed`` is called before anything of
    what is known here is changed.
    """

    def __init__(
        self,
        keys: RunKeys,
        on_present: Callable[[bytes], None],
        on_pushed: Callable[[bytes], None],
        on_changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.keys = keys
        self._on_present = on_present
        self._on_pushed = on_pushed
        self._on_changed = on_changed
        self._cells: dict[bytes, Cell] = {}
        self.values: dict[bytes, tuple[bytes, int]] = {}
        """Every value that is known, and since which revision it has been so. Not to be written."""
        self.sums = Sums()
        self._absent: deque[tuple[int, bytes]] = deque()
        self._applied = 0

    def value(self, key: bytes) -> bytes | None:
        """The value of ``key``, or None where none is known."""
        entry = self.values.get(key)
        return entry[0] if entry is not None else None

    def value_revision(self, key: bytes) -> int:
        """Since when ``key`` has had its value; 0 where none is known."""
        entry = self.values.get(key)
        return entry[1] if entry is not None else 0

    def exists(self, key: bytes) -> bool:
        """Whether ``key`` is known to exist."""
        if key in self.values:
            return True
        cell = self._cells.get(key)
        return cell is not None and bool(cell.queue())

    def cell(self, key: bytes) -> Cell:
        """The cell of ``key``; an empty one where nothing is known."""
        return self._cells.get(key) or Cell()

    def existing(self) -> Iterator[bytes]:
        """Every key with a value (queues are not counted)."""
        return iter(tuple(self.values))

    def reads(self, key: bytes) -> list[Range]:
        """What reads ``key`` in full: its value, what was added, its queue."""
        return [
            Range(self.keys.value(key)),
            Range(self.keys.addends(key), prefix=True),
            Range(self.keys.queue(key), prefix=True),
        ]

    def unchanged(self, key: bytes) -> tuple[Compare, ...]:
        """Compares that hold while the value of ``key`` is as it is known here.

        The range compare is blind to deletions; addends are deleted only together with a write
        of the value itself.
        """
        cell = self.cell(key)
        return (
            Compare(self.keys.value(key), "mod", "=", cell.base.compared),
            Compare(self.keys.addends(key), "mod", "<", cell.newest_revision() + 1, prefix=True),
        )

    def begin_anew(self) -> None:
        """The store was restored or emptied: revisions start anew, and so does what is known."""
        self._on_changed()
        self._cells.clear()
        self.values.clear()
        self._absent.clear()
        self._applied = 0

    def apply(self, events: Sequence[WatchEvent], revision: int, *, in_order: bool = True) -> None:
        """Take one batch of the mirror in; everything up to ``revision`` has come with it.

        ``in_order``: it is all that happened, in the order in which it did.
        """
        prefix = self.keys.prefix
        for event in events:
            kv, present = event.kv, event.kind == "put"
            if kv.key.startswith(prefix):
                taken = self._take(kv, present=present)
                if present and (awaited := self.sums.of(kv.key)) is not None:
                    # Where more is known than had happened by then, it came to something else.
                    exact = taken if in_order else None
                    awaited.note(kv.mod_revision, exact.total() if exact is not None else None)
        self._applied = revision
        gone: set[bytes] = set()
        while self._absent and self._absent[0][0] <= revision:
            gone.add(self._absent.popleft()[1])
        for key in gone:
            self._forget(key, revision)

    def learn(self, kvs: Sequence[KeyValue]) -> None:
        """Take in what a read or an own write showed.

        An answer may be older than what the watch has brought meanwhile: what it shows of before,
        and is not known, has gone since.
        """
        for kv in kvs:
            if kv.mod_revision > self._applied:
                self._take(kv, present=True)

    def learn_cell(self, key: bytes, revision: int, kvs: Sequence[KeyValue]) -> Cell:
        """Take in what ``reads`` showed at ``revision``."""
        there = {kv.key for kv in kvs}
        self.learn(kvs)
        for name in self._names(key):
            if name not in there:
                self.learn_absent(name, revision)
        self._settle(key, value=revision, queue=revision)
        return self.cell(key)

    def learn_value(self, key: bytes, value: bytes, revision: int) -> None:
        """Take in that ``key`` was set at ``revision``, and what was added to it is gone."""
        for adder in tuple(self.cell(key).addends):
            self.learn_absent(self.keys.addend(key, adder), revision)
        self.learn([KeyValue(self.keys.value(key), value, revision, revision, 1, 0)])
        self._settle(key, value=revision)

    def learn_gone(self, key: bytes, revision: int) -> None:
        """Take in that ``key`` was deleted at ``revision`` with all that belongs to it."""
        self.learn_absent(self.keys.value(key), revision)
        self.learn_cell(key, revision, ())

    def learn_absent(self, key: str, revision: int) -> None:
        """Take in that a key of the store was absent at ``revision``."""
        if revision > self._applied:
            self._take(KeyValue(key, b"", 0, revision, 0, 0), present=False)

    def _settle(self, key: bytes, *, value: int, queue: int = 0) -> None:
        """Take note that the value, or the queue, of ``key`` is known as of a revision."""
        cell = self._cells.get(key)
        if cell is not None:
            cell.value_settled = max(cell.value_settled, value)
            cell.queue_settled = max(cell.queue_settled, queue)

    def _names(self, key: bytes) -> list[str]:
        """The store's keys that ``key`` is known to consist of."""
        cell = self.cell(key)
        names = [self.keys.value(key)] if cell.base is not ABSENT else []
        names += [self.keys.addend(key, adder) for adder in cell.addends]
        names += [self.keys.element(key, element) for element in cell.elements]
        return names

    def _take(self, kv: KeyValue, *, present: bool) -> Cell | None:
        """Take one key of the store in; return its cell, or None if that is no news."""
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
        """Drop parts that are absent for good: the watch has passed their deletion."""
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
