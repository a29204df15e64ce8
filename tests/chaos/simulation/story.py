# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in one simulation, drawn from its seed, and the calm after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from rdzv.draining import cancel
from rdzv.store.memory import transact
from tests.chaos.simulation.invariants import Broken, Invariants
from tests.chaos.simulation.network import Weather
from tests.chaos.simulation.nodes import KEYS, LEASE_TTL_S
from tests.chaos.simulation.pods import Pod, SimulatedJob
from tests.chaos.simulation.settling import unsettled

LIVENESS_S = 150.0
"""Within so long after the last fault everything must have come right."""

BAD = (
    Weather(0.05, refused=0.1),
    Weather(0.3, lost=0.05, unanswered=0.05),
    Weather(0.1, late=0.1, unanswered=0.1),
    Weather(1.0),
)

Event = Callable[["Story"], None]


class Story:
    """Lets things happen to a job, at random times, and ends with a calm."""

    def __init__(
        self, job: SimulatedJob, invariants: Invariants, random: Random, plot: Plot
    ) -> None:
        self.job = job
        self.random = random
        self._invariants = invariants
        self._plot = plot
        self._mending: set[asyncio.Task[None]] = set()

    async def run(self, pods: int, events: int) -> None:
        """Tell all of it."""
        plot = self._plot
        for name in "abcdefgh"[:pods]:
            self._come(name)
            await asyncio.sleep(self.random.random() * 0.5)
        if plot.healthy:
            await self._until_settled()
            self._invariants.rounds.may_form = False
        else:
            await self._pass(self.random.uniform(1.0, 4.0))
        for _ in range(events):
            self.random.choices(list(plot.events), list(plot.events.values()))[0](self)
            await self._pass(self.random.uniform(0.1, 3.0))
        await self._calm()

    # -- events

    def cut_one(self) -> None:
        """Cut one pod from the store."""
        pod = self._any()
        if pod is None or pod.link is None or not pod.link.whole:
            return
        link, refuses = pod.link, self.random.random() < 0.3
        self._say(pod, f"is cut off ({'refused' if refuses else 'black hole'})")
        link.cut(refuses=refuses)
        self._later(self._outage_s(), lambda: self._mend(pod))

    def cut_all(self) -> None:
        """Take the store away from everybody."""
        if not self.job.whole:
            return
        self._say(None, "the store is out of reach for all")
        self.job.cut_all(refuses=self.random.random() < 0.3)
        self._later(self._outage_s(), self._mend_all)

    def tear(self) -> None:
        """Break one connection, which is made again at once."""
        pod = self._any()
        if pod is not None and pod.link is not None:
            self._say(pod, "loses its connection")
            pod.link.tear()

    def stall(self) -> None:
        """Hold one watch back."""
        pod = self._any()
        if pod is not None and pod.link is not None:
            seconds = self.random.uniform(0.5, 8.0)
            self._say(pod, f"its watch stalls for {seconds:.3f} s")
            pod.link.stall(seconds)

    def compact(self) -> None:
        """Forget the store's history up to now."""
        engine = self.job.engine
        if engine.compact_revision < engine.revision:
            self._say(None, f"the store is compacted at {engine.revision}")
            engine.compact(engine.revision)

    def freeze(self) -> None:
        """Stop one sidecar, and let it go on later as if nothing had been."""
        pod = self._any()
        if pod is None or pod.sidecar is None or pod.sidecar.process.frozen:
            return
        process = pod.sidecar.process
        process.frozen = True
        self._say(pod, "its sidecar freezes")
        self._later(self._outage_s(), lambda: self._thaw(pod, process))

    def crash(self) -> None:
        """Kill one sidecar; another one starts in its place."""
        pod = self._any()
        if pod is not None and pod.sidecar is not None:
            pod.crash()
            down_s = self.random.choice((0.2, 1.0, LEASE_TTL_S + 2))
            self._later(down_s, lambda: self._restart(pod))

    def die(self) -> None:
        """Lose one pod for good; one of the same name may come."""
        pod = self._any()
        if pod is None or len(self.job.present()) <= 1:
            return
        pod.die()
        self._later(self.random.uniform(0.5, 15.0), lambda: self._replace(pod))

    def crash_briefly(self) -> None:
        """Kill one sidecar, which is back before anybody could miss it."""
        pod = self._any()
        if pod is not None and pod.sidecar is not None:
            pod.crash()
            self._later(self.random.uniform(0.1, 1.0), lambda: self._restart(pod))

    def end_torchrun(self) -> None:
        """Kill one training container; it is started again."""
        pod = self._any()
        if pod is not None and pod.torchrun is not None:
            pod.end_container()
            self._later(self.random.uniform(0.5, 4.0), pod.start_container)

    def fail_workers(self) -> None:
        """Let one pod's workers fail; its agent has restarts left."""
        pod = self._any()
        if pod is not None and pod.torchrun is not None:
            pod.torchrun.order("rejoin")

    def close(self) -> None:
        """Let one pod's workers fail for the last time: its agent wants the run closed."""
        pod = self._any()
        if pod is not None and pod.torchrun is not None:
            self._invariants.rounds.may_close = True
            pod.torchrun.order("fail")

    def notice(self) -> None:
        """Give one pod notice that it ends."""
        pod = self._any()
        if pod is None or pod.terminating or pod.sidecar is None:
            return
        pod.terminate(self.random.choice((5.0, 10.0, 20.0)), "sigterm")
        self._later(self.random.uniform(1.0, 15.0), lambda: self._replace(pod))

    def notice_and_cancel(self) -> None:
        """Drain one pod by hand, and think better of it."""
        pod = self._any()
        if pod is None or pod.terminating or pod.sidecar is None:
            return
        pod.terminate(20.0, "control")
        self._later(self.random.uniform(0.1, 5.0), lambda: self._cancel(pod))
        self._later(self.random.uniform(5.0, 10.0), lambda: self._replace(pod))

    def evict_and_crash(self) -> None:
        """Revoke one lease by hand; kill the sidecar while it registers anew, which lands late."""
        pod = self._any()
        if pod is None or pod.link is None or not self._evict(pod):
            return
        pod.link.dawdle(2.0)
        self._later(self.random.uniform(0.1, 1.9), lambda: self._crash_for_a_moment(pod))

    def evict_and_notice(self) -> None:
        """Revoke one lease behind a watch that stalls, and give that pod notice."""
        pod = self._any()
        if pod is None or pod.terminating or not self._evict(pod, unseen=True):
            return
        pod.terminate(self.random.choice((10.0, 20.0)), "sigterm")
        self._later(self.random.uniform(1.0, 15.0), lambda: self._replace(pod))

    def evict_and_end_torchrun(self) -> None:
        """Revoke one lease behind a watch that stalls, and kill that pod's training container."""
        pod = self._any()
        if pod is not None and pod.torchrun is not None and self._evict(pod, unseen=True):
            pod.end_container()
            self._later(self.random.uniform(0.5, 4.0), pod.start_container)

    def bad_weather(self) -> None:
        """Let calls be lost, refused, late, for everybody."""
        weather = self.random.choice(BAD)
        self._say(None, f"weather: {weather}")
        self.job.set_weather(weather)
        self._later(self.random.uniform(1.0, 15.0), lambda: self.job.set_weather(Weather()))

    # -- how

    def _any(self) -> Pod | None:
        present = self.job.present()
        return self.random.choice(present) if present else None

    def _evict(self, pod: Pod, *, unseen: bool = False) -> bool:
        lease_id = pod.sidecar.registrar.lease_id if pod.sidecar else None
        if lease_id is None or lease_id not in self.job.engine.leases or pod.link is None:
            return False
        if unseen:
            pod.link.stall(self.random.uniform(1.0, 3.0))
        self._say(pod, f"its lease is revoked by hand{', unseen by it' if unseen else ''}")
        self.job.engine.revoke(lease_id)
        return True

    def _crash_for_a_moment(self, pod: Pod) -> None:
        if pod.sidecar is not None:
            pod.crash()
            self._later(0.2, lambda: self._restart(pod))

    def _outage_s(self) -> float:
        longest_s = self.random.choice((1.5, 5.0, LEASE_TTL_S + 8))
        return self.random.uniform(0.3, longest_s)

    def _say(self, pod: Pod | None, what: str) -> None:
        self.job.timeline.add(pod.name if pod else "story", what)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            act()

        task = asyncio.create_task(wait())
        self._mending.add(task)
        task.add_done_callback(self._mending.discard)

    def _mend(self, pod: Pod) -> None:
        if pod.link is not None and not pod.link.whole and self.job.whole:
            self._say(pod, "reaches the store again")
            pod.link.mend()

    def _mend_all(self) -> None:
        self._say(None, "the store is back for all")
        self.job.mend_all()

    def _thaw(self, pod: Pod, process: object) -> None:
        if pod.sidecar is not None and pod.sidecar.process is process:
            self._say(pod, "its sidecar goes on")
            self.job.loop.thaw(pod.sidecar.process)

    def _restart(self, pod: Pod) -> None:
        if not pod.gone and pod.sidecar is None:
            pod.start()

    def _replace(self, pod: Pod) -> None:
        if pod.gone and self.job.pods[pod.name] is pod:
            self._come(pod.name)
        elif pod.terminating and not pod.gone:
            self._later(3.0, lambda: self._replace(pod))

    def _come(self, name: str) -> None:
        pod = self.job.add(name)
        if self._plot.trains:
            self._later(self.random.uniform(0.0, 2.0), pod.start_container)

    def _cancel(self, pod: Pod) -> None:
        """Do as ``muster drain --cancel`` does, over a cable of its own that always works."""
        snapshot = self._invariants.snapshot
        writes = cancel(KEYS, snapshot, pod.pod_uid)
        if isinstance(writes, str):
            self._say(pod, f"is not cancelled: {writes}")
        else:
            self._say(pod, "its drain is cancelled")
            transact(self.job.engine, *writes)

    async def _pass(self, seconds: float) -> None:
        until_s = self.job.loop.time() + seconds
        while (left_s := until_s - self.job.loop.time()) > 0:
            await asyncio.sleep(min(1.0, left_s))
            self._invariants.look()

    # -- the calm

    async def _calm(self) -> None:
        """Let every fault pass, and see that everything comes right."""
        self.job.timeline.add("story", "calm")
        while self._mending:
            await self._pass(1.0)
        self.job.set_weather(Weather())
        self.job.mend_all()
        await self._until_settled()

    async def _until_settled(self) -> None:
        until_s = self.job.loop.time() + LIVENESS_S
        while (why := unsettled(self.job, self._invariants, trains=self._plot.trains)) is not None:
            if self.job.loop.time() > until_s:
                raise Broken(f"not settled after {LIVENESS_S:.0f} s without a fault: {why}")
            await self._pass(1.0)


@dataclass(frozen=True, slots=True)
class Plot:
    """What kind of story: which events, and how often each. ``trains``: with torchruns and ranks.

    ``healthy``: of its events none may cost a world that trains. ``pods``: how many, one of these.
    """

    name: str
    events: Mapping[Event, int]
    pods: tuple[int, ...] = (3, 3, 4)
    trains: bool = True
    healthy: bool = False


OUTAGES: Mapping[Event, int] = {
    Story.cut_one: 3,
    Story.cut_all: 1,
    Story.tear: 2,
    Story.stall: 2,
    Story.compact: 1,
    Story.freeze: 2,
    Story.crash: 2,
    Story.bad_weather: 2,
}
PLOTS = (
    Plot("members", {**OUTAGES, Story.die: 2}, (3, 4, 5), trains=False),
    Plot(
        "outages",
        {
            Story.cut_all: 2,
            Story.tear: 2,
            Story.stall: 2,
            Story.compact: 1,
            Story.crash_briefly: 2,
        },
        healthy=True,
    ),
    Plot(
        "rounds",
        {**OUTAGES, Story.die: 2, Story.end_torchrun: 3, Story.fail_workers: 2, Story.close: 1},
    ),
    Plot(
        "drains",
        {
            **OUTAGES,
            Story.die: 1,
            Story.end_torchrun: 1,
            Story.notice: 8,
            Story.notice_and_cancel: 3,
        },
    ),
)
SHARES = (5, 3, 3, 3)

EVICTIONS = (
    Plot("evicted-members", {**OUTAGES, Story.evict_and_crash: 4}, (3, 4, 5), trains=False),
    Plot(
        "evicted-rounds",
        {**OUTAGES, Story.end_torchrun: 2, Story.evict_and_end_torchrun: 4},
    ),
    Plot("evicted-drains", {**OUTAGES, Story.notice: 2, Story.evict_and_notice: 4}),
)
"""Leases revoked by hand at bad moments."""

ASKED = (*EVICTIONS, Plot("cuts-of-all", {Story.cut_all: 1}, (3, 4, 5), trains=False))
"""Told only where asked for by name."""
