# SPDX-License-Identifier: Apache-2.0
"""The steps that this rank has saved: the few of them that are needed to find a common one.

Ranks are read at different moments, and one may have saved again by then. So each names, besides
its newest save, older ones that the others name, too: as every rank makes the same saves, the
newest of every fourth, sixteenth and sixty-fourth are the same on all, for a while.
"""

from __future__ import annotations

from typing import Dict, Tuple

SPREAD = (1, 4, 16, 64)
"""For each number, the newest save whose count is a multiple of it is named."""


class SavedSteps:
    """The saves to report: ``named``, newest first, and their ``cursors``, empty texts for none."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Name none of the saves so far."""
        self.named: Tuple[int, ...] = ()
        self.cursors: Dict[int, str] = {}
        self.with_cursors = False
        """Whether any of them has a cursor: looked at with each step."""
        self._count = 0
        self._newest_of: Dict[int, int] = {}

    def add(self, step: int, cursor: str = "") -> None:
        """Record that ``step`` is saved; ignore one that is not above all before.

        ``cursor`` is its text. The newest step may get one in a later call, or another.
        """
        if self.named and step <= self.named[0]:
            if step == self.named[0] and cursor:
                self.cursors[step] = cursor
                self.with_cursors = True
            return
        self.cursors[step] = cursor
        self._count += 1
        for many in SPREAD:
            if self._count % many == 0:
                self._newest_of[many] = step
        self.named = tuple(sorted(set(self._newest_of.values()), reverse=True))
        self.cursors = {named: self.cursors[named] for named in self.named}
        self.with_cursors = any(self.cursors.values())

    def come_to(self, step: int) -> None:
        """Forget saves of later steps: they are of a loop that has counted its steps otherwise."""
        if self.named and self.named[0] > step:
            self.forget()
