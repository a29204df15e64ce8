# SPDX-License-Identifier: Apache-2.0
"""I11: with ``min`` healthy pods that ask, and a store in reach, a world trains within a bound.

A pod is healthy while its launcher runs, its sidecar does, and nothing stands between that and
the store. Whatever the others do must not keep those from training. In a paused job none does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from launcher_shim.c10d.rounds.inputs import RoundPolicy
from tests.simulation.network import FAIR
from tests.simulation.pods import Pod, SimulatedJob
from tests.simulation.ranks import Rank
from tests.simulation.torchrun import RUN

BOUND_S = 120.0
"""For so long ``min`` pods may be healthy and no world train. A world whose keys all vanished is
kept for 60 s; then a lease may have to end, a last call to pass, and a launcher to look."""

STUCK_S = BOUND_S + RoundPolicy(1, 1).leave_s
"""And where workers do not end, for so long: others wait for them in the world that is lost."""


class Liveness:
    """Looks every second for how long pods have been healthy, and when the last step ended."""

    def __init__(self, job: SimulatedJob, break_: Callable[[str], None]) -> None:
        self._job = job
        self._break = break_
        self._healthy_since_s: dict[str, float] = {}
        self.trained_s = -math.inf
        self._paused_s = math.inf
        self._shapes = 1

    def trained(self, rank: Rank) -> None:
        """A rank has finished a step; all others of its world have begun it."""
        self.trained_s = self._job.loop.time()

    def look(self) -> None:
        """Take note of who is healthy now, and hold the job to it."""
        now = self._job.loop.time()
        bound_s = STUCK_S if self._job.sticks else BOUND_S
        self._paused_s = min(self._paused_s, now) if self._job.paused else math.inf
        if self.trained_s > self._paused_s + bound_s:
            self._break(f"a world trains, though the job has been paused for {bound_s:.0f} s")
        present = () if self._job.paused else self._job.present()
        healthy = {pod.pod_uid for pod in present if is_healthy(pod)}
        since_s = self._healthy_since_s
        if len(self._job.shapes) > self._shapes:
            # What was enough before, or is from now on, says nothing of the time until now.
            self._shapes, since_s = len(self._job.shapes), {}
        self._healthy_since_s = {uid: since_s.get(uid, now) for uid in healthy}
        for_long = sorted(uid for uid in healthy if now - self._healthy_since_s[uid] > bound_s)
        least = self._job.sizes.smallest
        if len(for_long) >= least and now - self.trained_s > bound_s:
            self._break(
                f"I11: {for_long} have asked for {bound_s:.0f} s, {least} are enough, and no world"
                " trains"
            )


def is_healthy(pod: Pod) -> bool:
    """Whether nothing is wrong with ``pod``, nor between it and the store."""
    sidecar, link = pod.sidecar, pod.link
    if sidecar is None or link is None or sidecar.process.frozen or sidecar.stopping:
        return False
    if (
        pod.terminating
        or pod.launcher not in ("steady", "late")
        or pod.torchrun is None
        or pod.torchrun.sticks
        or pod.run != RUN
    ):
        return False
    return link.whole and link.weather == FAIR and not link.lag_s
