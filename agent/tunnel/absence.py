# SPDX-License-Identifier: Apache-2.0
"""For how long a member has been away as a healthy watch sees it: pure."""

from __future__ import annotations

ABSENT_S = 1.5
"""For how long a healthy watch must miss a member until its commands are given up: one whose lease
ran out while it was busy registers again at once. With the second by which a store may notice late
that a lease has run out, and the grace of a worker that is killed, it is within
``launcher_shim.horovod.exec.lease.MARGIN_S``: no worker outlives its launcher by more than the
lease and that."""

LOOK_S = 0.25
"""Between two looks for one that is missed, beside those that changes bring."""

RETURN_S = 15.0
"""How long after a gap in the watch none is given up: what hid the store from here may have hidden
it from all until their leases ran out, and then each registers again in its own time."""


class Absence:
    """How long one member has been missed; it counts as gone after ``limit_s``."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since_s: float | None = None

    def over(self) -> None:
        """Note that it is there."""
        self._since_s = None

    def lasts(self, now: float, healthy_for_s: float) -> bool:
        """Note that it is away at ``now``; whether it has been for so long that it counts as gone.

        ``healthy_for_s``: for how long the watch has had no gap; what was before does not count.
        """
        if self._since_s is None:
            self._since_s = now
        return now - self._since_s >= self._limit_s and healthy_for_s >= RETURN_S
