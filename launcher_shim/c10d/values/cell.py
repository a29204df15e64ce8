# SPDX-License-Identifier: Apache-2.0
"""A cell: one key of a launcher, which may have several parts in the store.

A plain value is one store key. Each client that adds to a counter has a store key of its own, so
that hundreds that add at once do not contend. Each element of a queue is a store key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

from rdzv.dataclass import dataclass
from rdzv.errors import WireError
from rdzv.mirror import Mirror

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

    @property
    def compared(self) -> int:
        """The mod revision to compare with: 0 if the part is absent."""
        return 0 if self.value is None else self.mod_revision


ABSENT = Part(None, 0, 0)


@dataclass(slots=True)
class Cell:
    """The known parts of one launcher key."""

    value_settled: int = 0
    """Every change of the value up to this revision is known: an older one is skipped."""
    queue_settled: int = 0
    """The same of the queue."""
    base: Part = ABSENT
    """The plain value."""
    addends: dict[str, Part] = field(default_factory=dict)
    """The addend of each client. Changed by ``put_addend`` alone, which keeps the sum: hundreds
    come at once, and each changes the value."""
    elements: dict[str, Part] = field(default_factory=dict)
    """The queue, by name of the element."""
    _sum: int = 0
    _present: int = 0
    _unreadable: int = 0
    _newest_present: int = 0

    def put_addend(self, adder: str, part: Part) -> None:
        """Set one client's addend; ``part`` may say that it is gone."""
        former = self.addends.get(adder, ABSENT)
        self.addends[adder] = part
        self._count(former, -1)
        self._count(part, 1)
        if part.value is not None:
            self._newest_present = max(self._newest_present, part.mod_revision)
        elif former.mod_revision == self._newest_present:
            present = (one for one in self.addends.values() if one.value is not None)
            self._newest_present = max((one.mod_revision for one in present), default=0)

    def _count(self, part: Part, times: int) -> None:
        if part.value is None:
            return
        self._present += times
        try:
            self._sum += times * read_number(part.value)
        except NotANumber:
            self._unreadable += times

    def value(self) -> bytes | None:
        """Return the plain value plus all addends; None if there is neither."""
        if not self._present:
            return self.base.value
        # Only a writer other than Muster can have stored an addend that is no number; ignore them
        # then.
        total = self.total()
        return self.base.value if total is None else b"%d" % total

    def total(self) -> int | None:
        """Return the counter; None if it is not a number."""
        if self._unreadable:
            return None
        try:
            base = read_number(self.base.value) if self.base.value is not None else 0
        except NotANumber:
            return None
        return wrap_int64(base + self._sum)

    def is_sum(self) -> bool:
        """Return whether there is any addend to the plain value."""
        return self._present > 0

    def queue(self) -> list[tuple[str, Part]]:
        """Return the present elements, oldest first."""
        there = [(name, part) for name, part in self.elements.items() if part.value is not None]
        return sorted(there, key=lambda item: (item[1].create_revision, item[0]))

    def exists(self) -> bool:
        """Return whether CHECK and WAIT see the key."""
        return self.value() is not None or bool(self.queue())

    def newest_revision(self) -> int:
        """Return the newest known revision of the value, deletions included."""
        return max(part.mod_revision for part in (self.base, *self.addends.values()))

    def newest_of_queue(self) -> int:
        """Return the newest known revision of the queue, deletions included."""
        return max((part.mod_revision for part in self.elements.values()), default=0)

    def value_revision(self) -> int:
        """Return the revision since which the value has been the present one."""
        base = self.base.mod_revision if self.base.value is not None else 0
        return max(base, self._newest_present)

    def queue_revision(self) -> int:
        """Return the revision of the oldest element; 0 if there is none."""
        return min((part.mod_revision for _, part in self.queue()), default=0)


class Floor:
    """The newest revision that an answer has shown (docs/decisions/endpoint.md).

    ``on_ahead`` is called when it rises above the mirror's: older cached values must not be
    answered then.
    """

    def __init__(self, mirror: Mirror, on_ahead: Callable[[], None]) -> None:
        self._mirror = mirror
        self._on_ahead = on_ahead
        self._revision = 0

    @property
    def reached(self) -> bool:
        """Whether the mirror has reached the floor, so that every cached value may be answered."""
        return self._mirror.revision >= self._revision

    def begin_anew(self) -> None:
        """Begin at 0: the store was restored or emptied, and its revisions start anew."""
        self._revision = 0

    def allows(self, revision: int) -> bool:
        """Return whether a value valid since ``revision`` may be answered; raise the floor then."""
        if revision > self._revision:
            self.raise_to(revision)
            return True
        return revision == self._revision or self._mirror.revision >= self._revision

    def raise_to(self, revision: int) -> None:
        """Raise the floor to the revision of an answer."""
        if revision > self._revision:
            self._revision = revision
            if self._mirror.revision < revision:
                self._on_ahead()

    def raise_to_read(self, cell: Cell, revision: int) -> None:
        """Raise the floor for the answer that ``cell`` was read at ``revision``."""
        self.raise_to(cell.newest_of_queue())
        if cell.value() is not None:
            self.raise_to(cell.value_revision())
            return
        # The start of its absence is known if its deletion was seen, or it never existed.
        self.raise_to(cell.newest_revision())
        if self._mirror.revision < self._revision:
            self.raise_to(revision)
