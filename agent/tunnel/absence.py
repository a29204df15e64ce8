# SPDX-License-Identifier: Apache-2.0
"""The time for which a member has been absent from a healthy watch: pure."""

from __future__ import annotations

ABSENT_S = 1.5
"""Time for which a healthy watch must miss a member until its commands are given up, in seconds: a
member whose lease expired while it was busy registers again at once. Together with the second by
which a store may notice an expired lease late, and the grace of a worker that is killed, it is
within ``launcher_shim.horovod.exec.frames.MARGIN_S``: no worker outlives its launcher by more than
the lease and that."""

LOOK_S = 0.25
"""Poll interval while a member is missed, besides the looks at each change, in seconds."""

RETURN_S = 15.0
"""Time after a gap in the watch for which no member is given up, in seconds: what hid the store
from here may have hidden it from all until their leases expired, and then each registers again in
its own time."""


class Absence:
    """The absence of one member, which counts as gone after ``limit_s``."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since_s: float | None = None

    def over(self) -> None:
        """Note that the member is present."""
        self._since_s = None

    def lasts(self, now: float, healthy_for_s: float) -> bool:
        """Note that the member is absent at ``now``; return whether it counts as gone.

        ``healthy_for_s``: for how long the watch has had no gap. It counts as gone only if that is
        ``RETURN_S`` or more.
        """
        if self._since_s is None:
            self._since_s = now
        return now - self._since_s >= self._limit_s and healthy_for_s >= RETURN_S
