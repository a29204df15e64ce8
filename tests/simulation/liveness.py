# SPDX-License-Identifier: Apache-2.0
"""I11: as many train as ask, up to the best allowed size, within a bound.

A pod is healthy while its launcher runs and has not finished, its sidecar runs, and nothing stands
between that and the store. While N pods are healthy for longer than ``Liveness.bound_s``, a world
of no fewer than the largest allowed size of N ends a step within that time, whatever the others do.
A world that formed, and whose pods are then all lost or cut off, starts that time again for the
others, once: they did their part, and wait for its return. In a paused job none does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from launcher_shim.c10d.rounds.decision import FIRST_S, FREE_STARTS, LONGEST_S
from launcher_shim.c10d.rounds.inputs import RoundPolicy
from launcher_shim.c10d.rounds.observations import START_MAX_S
from rdzv.snapshot import Snapshot
from tests.simulation.network import FAIR
from tests.simulation.nodes import LEASE_TTL_S
from tests.simulation.pods import Pod, SimulatedJob
from tests.simulation.ranks import Rank
from tests.simulation.torchrun import RUN

SLACK_S = 60.0
"""A world whose keys all vanished is kept for so long; and a round forms, and a step is made."""


class Liveness:
    """Looks every second for how long pods have been healthy, and which worlds train.

    ``truth`` gives the store's word; ``trained_s`` is when the last step ended.
    """

    def __init__(
        self, job: SimulatedJob, truth: Callable[[], Snapshot], break_: Callable[[str], None]
    ) -> None:
        self._job = job
        self._truth = truth
        self._break = break_
        self._healthy_since_s: dict[str, float] = {}
        self._trained_s: dict[int, float] = {}
        self._lost_world = (-1, -math.inf)
        self._out_since_s: dict[tuple[str, int], float] = {}
        self._paused_s = math.inf
        self._rules: object = None
        self.patience_s = 0.0
        """Time for which a script lets ranks stand still, beyond the bound."""

    @property
    def trained_s(self) -> float:
        """When a world of any size ended a step last."""
        return max(self._trained_s.values(), default=-math.inf)

    @property
    def bound_s(self) -> float:
        """T of I11: lease, confirmation, gather window, two of the longest starts, and a minute.

        Who comes beside a world waits for the first step of that one, and then makes its own. Some
        worlds may be lost before it to a pod that fails in each.
        """
        policy, job, rules = RoundPolicy(1, 1), self._job, self._truth().rules
        gather_s = rules.policy.gather_s if rules is not None else 0.0
        # Where workers do not end, others wait for them in the world that is lost.
        leave_s = policy.leave_s if job.sticks else 0.0
        mute_s = max((pod.mute_s for pod in job.present()), default=0.0)
        starts_s = 2 * min(job.start_s, START_MAX_S)
        if "failing" in job.launchers.values():
            starts_s += job.shape.quarantine.worlds * job.start_s
        waits_s = starts_s + leave_s + mute_s
        return LEASE_TTL_S + policy.confirm_s + gather_s + waits_s + SLACK_S + self.patience_s

    def trained(self, rank: Rank) -> None:
        """A rank has finished a step; all others of its world have begun it."""
        self._trained_s[rank.world.size] = self._job.loop.time()

    def look(self) -> None:
        """Take note of who is healthy now, and hold the job to it."""
        now, wait_s = self._job.loop.time(), wait_s_of(self._job)
        lost_world_s = self._lost_world_s(now)
        bound_s = self.bound_s + wait_s
        self._paused_s = min(self._paused_s, now) if self._job.paused else math.inf
        if self.trained_s > self._paused_s + bound_s:
            self._break(f"a world trains, though the job has been paused for {bound_s:.0f} s")
        # While the store refuses writes, the world that has formed trains on, and no other.
        excused = self._job.paused or self._job.engine.full
        present = () if excused else self._job.present()
        healthy = {pod.pod_uid for pod in present if is_healthy(pod)}
        rules, sizes = self._truth().rules, self._job.sizes
        mixed = any(pod.shape != self._job.template for pod in self._job.present())
        if mixed and rules is not None:
            sizes = rules.policy  # its pods uphold a template until a roll-out has replaced them
        unmarked = healthy - self._in_retry_pause(now)
        if sizes.largest(len(unmarked)):
            healthy = unmarked  # but a pause never keeps the others from training
        since_s = self._healthy_since_s
        in_force = (rules and rules.policy, sizes, mixed, wait_s)
        if in_force != self._rules:
            # What was the best size before, or is from now on, says nothing of the time until now.
            self._rules, since_s = in_force, {}
        self._healthy_since_s = {uid: since_s.get(uid, now) for uid in healthy}
        for_long = sorted(uid for uid in healthy if now - self._healthy_since_s[uid] > bound_s)
        best = sizes.largest(len(for_long))
        trained_s = max(
            (at_s for size, at_s in self._trained_s.items() if size >= best), default=-math.inf
        )
        if best and now - max(trained_s, lost_world_s) > bound_s:
            self._break(
                f"I11: {for_long} have asked for {bound_s:.0f} s, and no world of {best} trains"
            )

    def _lost_world_s(self, now: float) -> float:
        """When the newest world was first seen without a healthy pod; -inf if it has one."""
        current = self._job.invariants.rounds.round
        if current.complete and current.number != self._lost_world[0]:
            members = {seat.member for seat in current.frozen}
            if not any(is_healthy(pod) for pod in self._job.present() if pod.name in members):
                self._lost_world = (current.number, now)
        return self._lost_world[1]

    def _in_retry_pause(self, now: float) -> set[str]:
        """UIDs of pods that worlds form without, each for no longer than until its next try."""
        truth, terms = self._truth(), self._job.shape.quarantine
        since_s, self._out_since_s = self._out_since_s, {}
        for name in self._job.invariants.listing.quarantined:
            key = truth.members[name].pod_uid, truth.quarantines[name].pauses
            self._out_since_s[key] = since_s.get(key, now)
        another_is_tried = any(one.pauses and not one.out for one in truth.quarantines.values())
        times = 2 if another_is_tried else 1
        return {
            uid
            for (uid, pauses), out_s in self._out_since_s.items()
            if now - out_s <= times * max(terms.pause_s(pauses), terms.trial_s)
        }


def wait_s_of(job: SimulatedJob) -> float:
    """For how long the next world may wait, as those before it failed before a step.

    A pod that has been in no world yet ends the wait.
    """
    current = job.invariants.rounds.round
    if (
        current.failed_starts < FREE_STARTS
        or current.progress == "steps"
        or (current.complete and not current.waits)
    ):
        return 0.0
    if any(pod.worlds == 0 and is_healthy(pod) for pod in job.present()):
        return 0.0
    longer: float = FIRST_S * 2 ** (current.waits - current.complete)
    return min(LONGEST_S, longer)


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
        or pod.torchrun.finished
        or not pod.torchrun.runs.is_set()
        or pod.run != RUN
    ):
        return False
    return link.whole and link.weather == FAIR and not link.lag_s
