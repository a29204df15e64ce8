# SPDX-License-Identifier: Apache-2.0
"""The sum of a counter right after an own addition, taken from the watch.

Each adder has its addend in a store key of its own. Reading all of them with each addition would
cost N² reads if N agents add at once, as at torch's exit barrier. The watch brings every change in
the order of revisions, so the sum is known once the own addition has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Sum:
    """The sum of one counter at the newest change of one addend."""

    def __init__(self) -> None:
        self._revision = 0
        self._number: int | None = None
        self._noted = asyncio.Event()

    def note(self, revision: int, number: int | None) -> None:
        """Note the sum at ``revision``; None if it is not known."""
        if revision > self._revision:
            self._revision, self._number = revision, number
            self._noted.set()

    def number_at(self, revision: int) -> int | None:
        """Return the sum at ``revision``; None if it is not known, or not yet."""
        return self._number if self._revision == revision else None

    async def shown_at(self, revision: int) -> int | None:
        """Wait until the watch has shown ``revision``; see ``number_at``."""
        while self._revision < revision:
            self._noted.clear()
            await self._noted.wait()
        return self.number_at(revision)


class Sums:
    """The sums that are waited for, by the store key of the addend."""

    def __init__(self) -> None:
        self._awaited: dict[str, Sum] = {}

    @contextmanager
    def awaited(self, addend: str) -> Iterator[Sum]:
        """Record the sum at each change of ``addend`` until the end of the block."""
        awaited = self._awaited[addend] = Sum()
        try:
            yield awaited
        finally:
            if self._awaited.get(addend) is awaited:
                del self._awaited[addend]

    def of(self, addend: str) -> Sum | None:
        """Return the sum that is waited for at ``addend``, if any."""
        return self._awaited.get(addend)
