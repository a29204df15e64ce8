# SPDX-License-Identifier: Apache-2.0
"""The steps that this rank has saved, as few of them as a common one can be found by.

Ranks are asked at different moments, and one may have saved again by then. So each names, besides
its newest save, older ones that the others name, too: as every rank makes the same saves, the
newest of every fourth, sixteenth and sixty-fourth are the same on all, for a while.
"""

from __future__ import annotations

from typing import Dict, Tuple

SPREAD = (1, 4, 16, 64)
"""Of every so many saves, the newest is named."""


class SavedSteps:
    """``named`` are those to tell, newest first."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.named: Tuple[int, ...] = ()
        self._count = 0
        self._newest_of: Dict[int, int] = {}

    def add(self, step: int) -> None:
        """Take in that ``step`` is saved; one that is not above all before tells nothing new."""
        if self.named and step <= self.named[0]:
            return
        self._count += 1
        for many in SPREAD:
            if self._count % many == 0:
                self._newest_of[many] = step
        self.named = tuple(sorted(set(self._newest_of.values()), reverse=True))

    def come_to(self, step: int) -> None:
        """Forget saves of later steps: they are of a loop that has counted otherwise."""
        if self.named and self.named[0] > step:
            self._begin()
