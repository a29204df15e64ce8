# SPDX-License-Identifier: Apache-2.0
"""One launcher key, as far as its parts in the store are known.

A plain value is one store key; what was added to it is one store key for each adder, so that
hundreds that add at once do not contend; a queue is one store key for each element.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rdzv.errors import WireError

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
        """The mod revision that a compare must name: 0 for what is absent."""
        return 0 if self.value is None else self.mod_revision


ABSENT = Part(None, 0, 0)


@dataclass(slots=True)
class Cell:
    """One launcher key.

    Up to ``value_settled`` every change of the value is known, and up to ``queue_settled`` every
    change of the queue: a part that the watch brings later, from before, has gone since.
    """

    value_settled: int = 0
    queue_settled: int = 0
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
        """The newest modification known of the value, its absence included."""
        return max(part.mod_revision for part in (self.base, *self.addends.values()))

    def value_revision(self) -> int:
        """Since when the value has been what it is."""
        parts = (self.base, *self.addends.values())
        return max((part.mod_revision for part in parts if part.value is not None), default=0)

    def queue_revision(self) -> int:
        """When the oldest element came, or 0 if there is none."""
        return min((part.mod_revision for _, part in self.queue()), default=0)
