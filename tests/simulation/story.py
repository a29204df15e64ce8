# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in one simulation, drawn from its seed, and the calm after it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from random import Random

from tests.simulation.invariants import Broken, Invariants
from tests.simulation.liveness import wait_s_of
from tests.simulation.machines import Machines
from tests.simulation.network import Backup, Weather
from tests.simulation.nodes import LEASE_TTL_S
from tests.simulation.plot import Plot
from tests.simulation.pods import Pod, SimulatedJob
from tests.simulation.settling import PAUSES, left_out, unsettled

SOON_S = (0.0, 2.0)
LATE_S = (620.0, 900.0)
"""When the launcher of a pod starts."""

SHORT_STEP_S = 0.1
"""A step where starts take long: one fits into the time that a world takes to end."""
UPLOADS = 0.5
UPLOAD_S = (5.0, 60.0)
"""How often a rank has something left to do after the last step, and for how long."""

LIVENESS_S = 150.0
"""Within so long after the last fault everything must have come right.

But for a member that worlds form without: it must be in after its pause.
"""

STEP_S = 15.0
"""A world in which nobody wants anything trains a step in less."""


class Story:
    """Lets things happen to a job, at random times, and ends with a calm.

    ``told``: how often each event has happened; one that finds nobody to happen to does not count.
    ``backup``: of the store, from before the first pod came.
    """

    def __init__(
        self, job: SimulatedJob, invariants: Invariants, random: Random, plot: Plot
    ) -> None:
        self.job = job
        self.invariants = invariants
        self.random = random
        self.plot = plot
        self.told: Counter[str] = Counter()
        self.backup: Backup | None = None
        self._mending: set[asyncio.Task[None]] = set()
        self._waited_s = 0.0

    async def run(self, pods: int, events: int) -> None:
        """Tell all of it."""
        plot = self.plot
        self.set_scene()
        names = "abcdefgh"[:pods]
        if plot.misfits:
            most = pods - 1 if "late" in plot.misfits else pods - self.job.shape.least
            some = self.random.randint(1, most)
            for name in self.random.sample(names, some):
                self.job.launchers[name] = self.random.choice(plot.misfits)
        if plot.prologue is not None:
            plot.prologue(self)
            if self.job.strays:
                await self._until_mended()
        for name in names:
            self.come(name)
            await asyncio.sleep(self.random.random() * 0.5)
        if plot.healthy:
            await self._until_settled()
            self.invariants.rounds.may_form = False
        elif plot.ends:
            await self._until_settled()
            self._announce_the_last_step()
        else:
            await self._pass(self.random.uniform(1.0, 4.0))
        for _ in range(events):
            self.tell(self.random.choices(list(plot.events), list(plot.events.values()))[0])
            await self._pass(self.random.uniform(0.1, 3.0))
        await self._calm()

    def set_scene(self) -> None:
        """Let the job be of the plot's kind."""
        plot = self.plot
        self.job.stages = plot.stages
        self.job.blocks = plot.blocks
        self.job.sharded = plot.shards
        self.job.changes_in_place = plot.in_place
        if plot.start_s:
            self.job.start_s, self.job.step_s = plot.start_s, SHORT_STEP_S
        if plot.shards:
            self.job.shards.follow()
        if plot.machines:
            machines = self.job.machines = Machines(self.job, Random(self.random.random()))
            looking = asyncio.create_task(machines.look())
            looking.add_done_callback(lambda task: task.cancelled() or task.result())

    def _announce_the_last_step(self) -> None:
        trained = [step for world in self.job.worlds.values() for step in world.trained.values()]
        self.job.last_step = max(trained) + self.random.randint(2, 5)
        self.invariants.rounds.may_close = True
        if self.plot.stages > 1:
            self.invariants.rounds.await_the_last_stage()
        if self.plot.uploads:
            some = [pod.name for pod in self.job.present() if self.random.random() < UPLOADS]
            self.job.uploads_s = {name: self.random.uniform(*UPLOAD_S) for name in some}
        self.say(None, f"step {self.job.last_step} is the last one")

    def tell(self, event: Callable[[Story], None]) -> None:
        """Let an event happen, and count it."""
        lines = len(self.job.timeline.lines)
        event(self)
        if len(self.job.timeline.lines) > lines:
            self.told[event.__name__] += 1

    # -- for events

    def any(self) -> Pod | None:
        """Choose one of the pods that are not gone."""
        present = self.job.present()
        return self.random.choice(present) if present else None

    def say(self, pod: Pod | None, what: str) -> None:
        """Write one line; ``pod`` is None for what concerns all."""
        self.job.timeline.add(pod.name if pod else "story", what)

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Let something happen in ``seconds``; there is no calm before that."""

        async def wait() -> None:
            await asyncio.sleep(seconds)
            act()

        task = asyncio.create_task(wait())
        self._mending.add(task)
        task.add_done_callback(self._mending.discard)

    def outage_s(self) -> float:
        """Draw for how long something is away: moments, or longer than a lease lasts."""
        longest_s = self.random.choice((1.5, 5.0, LEASE_TTL_S + 8))
        return self.random.uniform(0.3, longest_s)

    def come(self, name: str) -> None:
        """Let a pod come, and soon after its launcher."""
        pod = self.job.add(name)
        if self.plot.trains:
            late = pod.launcher == "late"
            self.later(self.random.uniform(*(LATE_S if late else SOON_S)), pod.start_container)

    def restart(self, pod: Pod) -> None:
        """Start the sidecar of a pod that has none."""
        if not pod.gone and pod.sidecar is None:
            pod.start()

    def take_over(self, pod: Pod) -> None:
        """Let a pod of the same name come, as for one that was deleted by force; it runs on."""
        if self.job.pods[pod.name] is pod:
            self.come(pod.name)

    def replace(self, pod: Pod) -> None:
        """Let a pod of the same name come for one that is gone, or once it is."""
        if pod.gone and self.job.pods[pod.name] is pod:
            self.come(pod.name)
        elif pod.terminating and not pod.gone:
            self.later(3.0, lambda: self.replace(pod))

    # -- time

    async def _pass(self, seconds: float) -> None:
        until_s = self.job.loop.time() + seconds
        while (left_s := until_s - self.job.loop.time()) > 0:
            await asyncio.sleep(min(1.0, left_s))
            self.invariants.look()

    async def _until_mended(self) -> None:
        while self._mending:
            await self._pass(1.0)

    async def _calm(self) -> None:
        """Let every fault pass, and see that everything comes right."""
        self.say(None, "calm")
        await self._until_mended()
        self.job.set_weather(Weather())
        self.job.mend_all()
        self.job.disks_fail = False
        await self.settle()

    async def settle(self) -> None:
        """See everything come right as things are now, and a world train on."""
        await self._until_settled()
        await self._until_a_step()
        if self.job.sharded:
            self.job.shards.check()

    async def _until_a_step(self) -> None:
        """See a world train on: one that has stood still since its second step looks settled."""
        job, rounds, liveness = self.job, self.invariants.rounds, self.invariants.liveness
        began_s = job.loop.time()
        if not self.plot.trains or job.paused or "crashing" in job.launchers.values():
            return
        while rounds.round.complete and not rounds.round.closed and liveness.trained_s < began_s:
            if job.loop.time() > began_s + STEP_S:
                raise Broken(f"I11: no step in {STEP_S:.0f} s after everything had settled")
            await self._pass(1.0)

    async def _until_settled(self) -> None:
        """See everything come right; whom worlds form without comes in after its pause."""
        began_s, self._waited_s = self.job.loop.time(), 0.0
        invariants, job = self.invariants, self.job

        def pauses() -> Mapping[str, float]:
            return left_out(job, invariants)

        await self._until_right(began_s, self._within_s, pauses, at_last=False)

        longest_s = 0.0

        def within_s() -> float:
            nonlocal longest_s
            longest_s = max(longest_s, *pauses().values(), 0.0)
            # Another one may be tried alone before it; who fails in every world is let in often.
            times = 2 * PAUSES if "failing" in job.launchers.values() else 2
            return self._within_s() + times * longest_s

        await self._until_right(began_s, within_s, dict, at_last=True)

    def _within_s(self) -> float:
        """Return within how long everything must have come right, but for the quarantined.

        Who has come last waits for the first step of the others, and makes its own after that.
        """
        mute_s = max((pod.mute_s for pod in self.job.present()), default=0.0)
        self._waited_s = max(self._waited_s, wait_s_of(self.job))
        return LIVENESS_S + 2 * self.job.start_s + mute_s + self._waited_s

    async def _until_right(
        self,
        began_s: float,
        within_s: Callable[[], float],
        kept_out: Callable[[], Collection[str]],
        *,
        at_last: bool,
    ) -> None:
        job, invariants, trains = self.job, self.invariants, self.plot.trains
        while (
            why := unsettled(job, invariants, trains=trains, kept_out=kept_out(), at_last=at_last)
        ) is not None:
            due_s = within_s()
            if job.loop.time() > began_s + due_s:
                raise Broken(f"I11: not settled after {due_s:.0f} s without a fault: {why}")
            await self._pass(1.0)
