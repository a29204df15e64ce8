# SPDX-License-Identifier: Apache-2.0
"""What a counter came to at one's own addition, as the watch tells it.

Each adder has its addend in a store key of its own. To read all of them with each addition costs
N² keys where N agents add at once, as at torch's exit barrier. The watch brings every change in
the order of the store's revisions, so that the counter is known when one's own change has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Sum:
    """What one counter came to at the newest change of one adder."""

    def __init__(self) -> None:
        self._revision = 0
        self._number: int | None = None
        self._noted = asyncio.Event()

    def note(self, revision: int, number: int | None) -> None:
        """Take note of what it came to at ``revision``; None: that is not known."""
        if revision > self._revision:
            self._revision, self._number = revision, number
            self._noted.set()

    def number_at(self, revision: int) -> int | None:
        """What it came to at ``revision``; None where that is not known, or not yet."""
        return self._number if self._revision == revision else None

    async def shown_at(self, revision: int) -> int | None:
        """Wait until the watch has shown ``revision``; see ``number_at``."""
        while self._revision < revision:
            self._noted.clear()
            await self._noted.wait()
        return self.number_at(revision)


class Sums:
    """Who waits for the change of which addend, by its key in the store."""

    def __init__(self) -> None:
        self._awaited: dict[str, Sum] = {}

    @contextmanager
    def awaited(self, addend: str) -> Iterator[Sum]:
        """Have told, until the end of the block, what the counter comes to at each change."""
        awaited = self._awaited[addend] = Sum()
        try:
            yield awaited
        finally:
            if self._awaited.get(addend) is awaited:
                del self._awaited[addend]

    def of(self, addend: str) -> Sum | None:
        """Who waits for this one, if anybody does."""
        return self._awaited.get(addend)
