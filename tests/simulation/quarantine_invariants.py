# SPDX-License-Identifier: Apache-2.0
"""Who is kept out until somebody lets it in stays out; in no story does anybody do so."""

from __future__ import annotations

from collections.abc import Callable

from rdzv.snapshot import Snapshot
from tests.simulation.pods import SimulatedJob


class QuarantineInvariants:
    """``since_s``: since when a pod is kept out for good, in virtual time, by its UID."""

    def __init__(self, job: SimulatedJob, break_: Callable[[str], None]) -> None:
        self.since_s: dict[str, float] = {}
        self._job = job
        self._break = break_

    def committed(self, before: Snapshot, after: Snapshot) -> None:
        """Compare what one revision made of the records."""
        terms, now = self._job.shape.quarantine, self._job.loop.time()
        same_life = before.job is not None and before.job == after.job
        for name, member in after.members.items():
            was, now_is = before.quarantine_of(member), after.quarantine_of(member)
            stays = now_is is not None and now_is.stays(terms)
            if stays:
                self.since_s.setdefault(member.pod_uid, now)
            elif same_life and was is not None and was.stays(terms):
                self._break(f"I11: {name} was to stay out until it is let in, and nobody has")
