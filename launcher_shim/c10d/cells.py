# SPDX-License-Identifier: Apache-2.0
"""What a run's launchers have stored, as the mirror and this sidecar's own writes show it.

A *cell* is one launcher key. A plain value is one store key; what was added to it is one store
key for each adder, so that hundreds that add at once do not contend; a queue is one store key
for each element. Own writes show at once, although the watch has not brought them yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rdzv.errors import WireError
from rdzv.keys import RunKeys
from rdzv.store import KeyValue, WatchEvent

INT64 = 1 << 64


class NotANumber(WireError):
    """An ADD on a value that C's ``stoll`` cannot read."""


def read_number(value: bytes) -> int:
    """Read a counter as the native server does: leading blanks, a sign, digits, then anything.

    Raises ``NotANumber``.
    """
    text = value.lstrip(b" \t\n\v\f\r")
    sign, digits = 1, text
    if text[:1] in (b"+", b"-"):
        sign, digits = (-1 if text[:1] == b"-" else 1), text[1:]
    end = 0
    while end < len(digits) and 48 <= digits[end] <= 57:
        end += 1
    significant = digits[:end].lstrip(b"0")
    number = sign * int(significant or b"0") if len(significant) <= 19 else INT64
    if end == 0 or not -INT64 // 2 <= number < INT64 // 2:
        raise NotANumber(f"{value[:32]!r} is not a 64-bit number")
    return number


def wrap_int64(number: int) -> int:
    """Wrap around as a signed 64-bit integer does."""
    return (number + INT64 // 2) % INT64 - INT64 // 2


@dataclass(frozen=True, slots=True)
class Part:
    """One store key of a cell; ``value`` None means that it is known to be absent."""

    value: bytes | None
    mod_revision: int
    create_revision: int


ABSENT = Part(None, 0, 0)


@dataclass(slots=True)
class Cell:
    """One launcher key."""

    base: Part = ABSENT
    addends: dict[str, Part] = field(default_factory=dict)
    elements: dict[str, Part] = field(default_factory=dict)

    def value(self) -> bytes | None:
        """The plain value with everything added to it, or None if there is none."""
        added = [part.value for part in self.addends.values() if part.value is not None]
        if not added:
            return self.base.value
        try:
            total = read_number(self.base.value) if self.base.value is not None else 0
            return b"%d" % wrap_int64(total + sum(read_number(value) for value in added))
        except NotANumber:
            # Only somebody who writes past us can bring this about; the plain value stays.
            return self.base.value

    def is_sum(self) -> bool:
        """Whether something has been added to the plain value."""
        return any(part.value is not None for part in self.addends.values())

    def queue(self) -> list[tuple[str, Part]]:
        """The elements that are there, oldest first."""
        there = [(name, part) for name, part in self.elements.items() if part.value is not None]
        return sorted(there, key=lambda item: (item[1].create_revision, item[0]))

    def exists(self) -> bool:
        """Whether CHECK and WAIT see it."""
        return self.value() is not None or bool(self.queue())

    def newest_revision(self) -> int:
        """The newest modification known of any part."""
        parts = (self.base, *self.addends.values(), *self.elements.values())
        return max(part.mod_revision for part in parts)


class Cells:
    """All cells of one run. ``on_present`` is called with each key that was created or updated."""

    def __init__(self, keys: RunKeys, on_present: Callable[[bytes], None]) -> None:
        self.keys = keys
        self._on_present = on_present
        self._cells: dict[bytes, Cell] = {}
        self._values: dict[bytes, bytes] = {}
        self._absent: list[tuple[int, bytes]] = []

    def value(self, key: bytes) -> bytes | None:
        """The value of ``key``, or None where none is known."""
        return self._values.get(key)

    def exists(self, key: bytes) -> bool:
        """Whether ``key`` is known to exist."""
        if key in self._values:
            return True
        cell = self._cells.get(key)
        return cell is not None and bool(cell.queue())

    def cell(self, key: bytes) -> Cell:
        """The cell of ``key``; an empty one where nothing is known."""
        return self._cells.get(key) or Cell()

    def existing(self) -> Iterator[bytes]:
        """Every key with a value (queues are not counted)."""
        return iter(tuple(self._values))

    def apply(self, events: Sequence[WatchEvent], revision: int) -> None:
        """Take one batch of the mirror in; everything up to ``revision`` has come with it."""
        prefix = self.keys.prefix
        for event in events:
            if event.kv.key.startswith(prefix):
                self._take(event.kv, present=event.kind == "put")
        while self._absent and self._absent[0][0] <= revision:
            self._forget(self._absent.pop(0)[1], revision)

    def learn(self, kvs: Sequence[KeyValue]) -> None:
        """Take in what a read or an own write showed."""
        for kv in kvs:
            self._take(kv, present=True)

    def learn_absent(self, key: str, revision: int) -> None:
        """Take in that a key of the store was absent at ``revision``."""
        self._take(KeyValue(key, b"", 0, revision, 0, 0), present=False)

    def _take(self, kv: KeyValue, *, present: bool) -> None:
        section, key, item = self.keys.split(kv.key)
        if section not in ("kv", "sum", "queue"):
            return
        cell = self._cells.setdefault(key, Cell())
        known = self._part(cell, section, item)
        if known.mod_revision >= kv.mod_revision:
            return
        part = Part(kv.value if present else None, kv.mod_revision, kv.create_revision)
        if section == "kv":
            cell.base = part
        elif section == "sum":
            cell.addends[item] = part
        else:
            cell.elements[item] = part
        if not present:
            self._absent.append((kv.mod_revision, key))
        self._revalue(key, cell)
        if present:
            self._on_present(key)

    @staticmethod
    def _part(cell: Cell, section: str, item: str) -> Part:
        if section == "kv":
            return cell.base
        parts = cell.addends if section == "sum" else cell.elements
        return parts.get(item, ABSENT)

    def _revalue(self, key: bytes, cell: Cell) -> None:
        value = cell.value()
        if value is None:
            self._values.pop(key, None)
        else:
            self._values[key] = value

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
