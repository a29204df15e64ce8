# SPDX-License-Identifier: Apache-2.0
"""The steps that a script counts itself, beside what this process knows of them.

A sampler knows which batches were taken of it, and the process how many boundaries it has come to.
A loader takes batches ahead of training, so a step of which none was taken is certainly not
trained; and each boundary comes after a step.
"""

from __future__ import annotations

from typing import Tuple

from muster import step_listeners

Place = Tuple[int, int]
"""An epoch, and a number of its samples."""

NOWHERE: Place = (-1, 0)
"""A place before all others."""


class CountedSteps:
    """The steps of one sampler since its place was last set."""

    def __init__(self) -> None:
        self._taken = NOWHERE
        self._boundaries = 0
        self._count = 0

    def take(self, end: Place) -> None:
        """Note that batches were taken of the global batch which ends there."""
        if self._taken == NOWHERE:
            self._boundaries = step_listeners.boundaries
        self._taken = max(self._taken, end)

    def count(self, begin: Place) -> bool:
        """Count the step of the global batch that begins there; return whether it can be trained.

        Nothing is known if no batch was taken here: a loader's workers may have taken them.
        """
        self._count += 1
        return self._taken == NOWHERE or begin < self._taken

    def fault(self, *, followed: bool) -> str:
        """Return why steps were trained that were not counted; or "".

        ``followed``: steps are counted, by ``follow`` or by the script. A boundary may come after
        several steps, and a loop that follows counts all of them.
        """
        if self._taken == NOWHERE:
            return ""
        if not followed:
            return "batches were taken without sampler.follow(loader)"
        passed = step_listeners.boundaries - self._boundaries
        if not 0 < self._count < passed:
            return ""
        return "sampler.advance() was not called after each step"
