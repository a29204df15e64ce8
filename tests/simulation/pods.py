# SPDX-License-Identifier: Apache-2.0
"""Pods: a run directory that lives as long as the pod, and the sidecars that come and go in it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING, Any

from agent.drain.notice import Notice, Phase, Source
from agent.rundir.reports import FailureReport
from agent.running import LEAVE_TIMEOUT_S
from launcher_shim.pod.hold import FINISHING, OutgoingNotice, reserve_s
from launcher_shim.rundir import layout
from rdzv.drain.gate import Gate
from rdzv.records.policy import JobPolicy
from rdzv.store import WatchEvent
from tests.simulation.network import Link, SimulatedEngine, Weather
from tests.simulation.nodes import JobShape, Sidecar
from tests.simulation.plot import Launchers
from tests.simulation.ranks import Rank, RoundId, Training, World
from tests.simulation.shards import ShardHistory
from tests.simulation.timeline import Timeline
from tests.simulation.torchrun import RUN, Torchrun
from tests.support.clocks.virtual import SimulatedLoop
from tests.support.sidecars.run_dir import MemoryRunDir

if TYPE_CHECKING:
    from tests.simulation.in_place import WorldsInPlace
    from tests.simulation.invariants import Invariants
    from tests.simulation.machines import Machines

RESTART_S = 2.0
"""Until a kubelet starts a container anew."""

CRASHING_S = (0.5, 4.0)
"""How long a launcher that crashes lives each time. A kubelet would wait longer each time before
it starts it again; here it never does."""

FAILING_S = (0.5, 2.5)
"""How long one that fails in each world is in it: less than ten steps take."""

BROKEN_S = (0.1, 1.0)
"""After how long workers that cannot start raise their error."""

LOADING = (0.5, 0.9)
"""The same where starts take long: while it loads, as a part of the longest start."""

TRIES_S = 60.0
"""Three attempts of 10 s and the pauses between them, and then the time to a periodic save."""

INSTANT_S = 1e-6
"""A shorter sleep may not move the clock."""

LATER_TRIES_S = 600.0
"""Five more attempts, and the pauses before them: then no save is waited for."""

SHUT = ("hold", "commit", "done")

NEXT_STAGE_S = (0.05, 4.0)
"""Between two torchruns of one command: the second one has to import torch."""


class Pod:
    """One pod. ``sidecar`` is None while none runs.

    ``finished``: its training container has ended well. ``due_s``: when its SIGTERM passes at the
    latest, in virtual time. ``run``: the run id that its launcher is started with. ``stage``: of
    which torchrun of its command it is the turn, in this ``container``; ``took_part``: whether one
    of that container has come to a rendezvous. ``topology``: where its machine stands.
    ``cut_off``: its node has no way to the store, whichever sidecar runs. ``began_s``: when the
    sidecar started. ``outcome``: of its drain, as ``muster-run`` was told after ``phases``.
    ``failures``: how often its workers or its torchrun have ended by themselves, and no failure of
    it is on record beyond that. ``worlds``: how many it has been in.
    """

    def __init__(
        self, job: SimulatedJob, name: str, pod_uid: str, shape: JobShape, topology: str = ""
    ) -> None:
        self.name = name
        self.shape = shape
        self.topology = topology
        self.pod_uid = pod_uid
        self.run_dir = MemoryRunDir()
        self.sidecar: Sidecar | None = None
        self.gone = False
        self.torchrun: Torchrun | None = None
        self.finished = False
        self.run = RUN
        self.stage = 1
        self.container = 0
        self.took_part = False
        self.terminating = False
        self.due_s = math.inf
        self.failures = 0
        self.worlds = 0
        self.cut_off = False
        self.began_s = 0.0
        self.outcome = ""
        self.phases = [""]
        self.training = Training()
        self._job = job
        self._lives = 0
        self.run_dir.on_hosts = lambda content: job.invariants.delivered(self, content)
        self._wrapper = job.loop.process(f"muster-run {name}")
        self._skew_s = job.random.random() * 1000
        self._random = Random(self._skew_s)

    @property
    def launcher(self) -> Launchers:
        """What becomes of its launcher; another pod of its name fares no better."""
        return self._job.launchers.get(self.name, "steady")

    @property
    def link(self) -> Link | None:
        """Its cable to the store, while a sidecar runs."""
        return self.sidecar.link if self.sidecar else None

    @property
    def mute_s(self) -> float:
        """For how long newcomers wait for it at most: it cannot vote, as its disk is broken.

        If its gate was shut then, its ranks stand still, and no periodic save comes.
        """
        if not self.run_dir.broken:
            return 0.0
        shown = self.run_dir.gate()
        shut = shown is not None and Gate.from_json(layout.GATE, shown).phase in SHUT
        return TRIES_S + (LATER_TRIES_S if shut else 0.0)

    def start(self) -> None:
        """Start a sidecar; its cable is as bad as the weather is."""
        job = self._job
        self._lives += 1
        self.began_s = job.loop.time()
        job.timeline.add(self.name, f"its sidecar starts, life {self._lives}")
        job.invariants.saw(self, {})
        link = Link(
            self.name, job.loop, job.engine, job.network, Random(job.random.random()), job.timeline
        )
        link.weather = job.weather
        if not job.whole or self.cut_off:
            link.cut(refuses=job.refuses)
        dial = job.machines.dial_of(self, self._running) if job.machines else None
        self.sidecar = Sidecar(
            job.loop,
            link,
            self.name,
            self.pod_uid,
            self.run_dir,
            self.shape,
            Random(job.random.random()),
            self._skew_s,
            self.topology,
            dial,
        )
        self.sidecar.task.add_done_callback(job.ended)
        self.sidecar.mirror.subscribe(self._saw)
        if self.torchrun is not None:
            self.torchrun.meet()

    def _running(self) -> Sidecar:
        assert self.sidecar is not None
        return self.sidecar

    def _saw(self, events: Sequence[WatchEvent]) -> None:
        if self.sidecar is None:
            return
        keys = [event.kv.key for event in events]
        if any("/drains/" in key for key in keys):
            self._job.invariants.saw(self, self.sidecar.membership.snapshot().drains)
        if any(key.endswith("/commit") for key in keys):
            self._job.invariants.saw_commit(self, self.sidecar.membership.snapshot().commit)

    def crash(self) -> None:
        """End the sidecar at once; requests that it has sent may still land."""
        if self.sidecar is not None:
            self._job.timeline.add(self.name, "its sidecar crashes")
            self._job.loop.kill(self.sidecar.process)
            if self._job.machines is not None:
                self._job.machines.closed(self.sidecar)
            self.sidecar = None

    def die(self) -> None:
        """The whole pod is gone, its run directory too."""
        self._job.timeline.add(self.name, "the pod dies")
        self.crash()
        self.end_container()
        self.gone = True

    # -- the training container

    def start_container(self) -> None:
        """Start a torchrun, unless one runs or none is to."""
        if self.torchrun is not None or self.gone or self.terminating or self.finished:
            return
        if self.launcher == "absent":
            self._job.timeline.add(self.name, "its torchrun cannot be started")
            return
        if self._job.stages > 1:
            self.stage, self.container, self.took_part = 1, self._job.next_number(), False
        self._start_torchrun()
        if self.launcher == "crashing":
            self._after(self._random.uniform(*CRASHING_S), self._crash_launcher, self.torchrun)

    def _start_torchrun(self) -> None:
        self._job.timeline.add(self.name, "torchrun starts")
        self.torchrun = Torchrun(self._job, self, self._job.next_number())

    def _next_stage(self, container: int) -> None:
        """Go on with the command, unless the container was ended meanwhile."""
        if container == self.container and self.torchrun is None and not self.terminating:
            self.stage += 1
            self._start_torchrun()

    def entered(self, torchrun: Torchrun) -> None:
        """Its torchrun is in a world."""
        self.worlds += 1
        if self.launcher == "broken":
            self._after(
                self._random.uniform(*BROKEN_S), self._cannot_start, torchrun, torchrun.round
            )
        if self.launcher == "failing":
            longest_s = self._job.start_s
            lives_s = [part * longest_s for part in LOADING] if longest_s else FAILING_S
            self._after(self._random.uniform(*lives_s), self._crash_launcher, torchrun)

    def _cannot_start(self, torchrun: Torchrun, number: int) -> None:
        rank = torchrun.rank
        if self.torchrun is torchrun and torchrun.round == number and rank is not None:
            process, at_s = self._job.next_number(), self._job.loop.time()
            self.run_dir.reported = (
                FailureReport(
                    process, 0, 0, rank.master, "ImportError", "no module", "train.py:1", at_s
                ),
            )
            torchrun.order("rejoin")

    def _crash_launcher(self, torchrun: Torchrun) -> None:
        if self.torchrun is torchrun:
            self._job.timeline.add(self.name, "its torchrun crashes")
            self.end_container()
            longest_s = self._job.back_off_s
            away_s = self._random.uniform(RESTART_S, longest_s) if longest_s else RESTART_S
            self._after(away_s, self.start_container)

    def _after(self, seconds: float, act: Callable[..., object], *args: object) -> None:
        self._job.loop.call_later(seconds, act, *args, context=self._job.director.context)

    def end_container(self) -> None:
        """Kill the torchrun."""
        torchrun, self.torchrun = self.torchrun, None
        self.container = 0
        if torchrun is not None:
            torchrun.kill()

    def container_ended(self, torchrun: Torchrun, *, succeeded: bool) -> None:
        """Start another torchrun: the next stage, or, as a kubelet does, for one that failed."""
        if self.torchrun is not torchrun:
            return
        self.torchrun = None
        if succeeded and self.stage < self._job.stages:
            next_s = self._random.uniform(*NEXT_STAGE_S)
            self._after(next_s, self._next_stage, self.container)
            return
        self.finished = succeeded
        self._after(RESTART_S, self.start_container)

    # -- its end

    def terminate(self, left_s: float, source: Source) -> None:
        """Give notice that the pod ends in ``left_s`` seconds, and see it through."""
        self.terminating = True
        self.due_s = self._job.loop.time() + left_s - reserve_s(left_s)
        self._job.timeline.add(self.name, f"notice ({source}), {left_s:.1f} s left")
        self._job.loop.spawn(self._wrapper, self._terminate(left_s, source), f"end of {self.name}")

    async def _terminate(self, left_s: float, source: Source) -> None:
        """What ``muster-run`` does with a SIGTERM, and the kubelet after that."""
        ends_s = self._job.loop.time() + left_s
        held = OutgoingNotice(source, "test", ends_s, ends_s - reserve_s(left_s))
        phase = await self._last_phase(held, source)
        if phase.name == "cancelled":
            self._job.timeline.add(self.name, "the drain is cancelled")
            self.terminating, self.due_s = False, math.inf
            self.start_container()
            return
        self.outcome = phase.outcome
        self._job.timeline.add(self.name, f"SIGTERM passes ({phase.outcome}): {phase.sentence}")
        self._job.invariants.let_go(self, phase.outcome, ends_s - reserve_s(left_s))
        self.end_container()
        await asyncio.sleep(0.2)
        if self.sidecar is not None:
            self.sidecar.stop()
            await asyncio.wait([self.sidecar.task], timeout=LEAVE_TIMEOUT_S + 1)
        self.die()

    async def _last_phase(self, held: OutgoingNotice, source: Source) -> Phase:
        loop = self._job.loop
        phases = self.phases = [""]
        while (left_s := held.until_s(phases[-1]) - loop.time()) > INSTANT_S:
            sidecar = self.sidecar
            if sidecar is None:
                await asyncio.sleep(min(0.2, left_s))
                continue
            told: asyncio.Future[Phase] = loop.create_future()
            notice = Notice(source, "test", max(0.0, held.end_s - loop.time()))
            loop.spawn(sidecar.process, _converse(sidecar, notice, told, phases), "notice")
            while self.sidecar is sidecar and not told.done() and left_s > INSTANT_S:
                await asyncio.wait([told], timeout=min(0.5, left_s))
                left_s = held.until_s(phases[-1]) - loop.time()
            if told.done():
                while phases[-1] == FINISHING and self.torchrun is not None and left_s > INSTANT_S:
                    await asyncio.sleep(min(0.2, left_s))
                    left_s = held.until_s(phases[-1]) - loop.time()
                return told.result()
        return Phase("released", "nobody said anything in time", "expired")


async def _converse(
    sidecar: Sidecar, notice: Notice, told: asyncio.Future[Phase], phases: list[str]
) -> None:
    """Serve a client of the notice socket, and list the phases."""
    sidecar.own.notify(notice)
    phase = await sidecar.own.phase_after(None)
    while not phase.last:
        phases.append(phase.name)
        phase = await sidecar.own.phase_after(phase)
    if not told.done():
        told.set_result(phase)


class SimulatedJob:
    """All pods of the job, past and present, and the store. ``disks_fail``: some saves fail.

    ``replaced``: those that ran on when another one of their name came.

    ``stages``: how many torchruns the command of each container runs, one after the other.
    ``blocks``: over how many blocks of machines its pods are spread, if they know of any.
    ``sharded``: its ranks train shards.
    ``changes_in_place``: its worlds do. ``start_s``: how long at most a rank takes before it takes
    part. ``back_off_s``: how long at most a kubelet waits before it starts a container again that
    has crashed; 0: always as short as can be.
    ``sizes``: those in force, the last of ``former_sizes``.
    ``template``: what a pod is started with that comes now; ``shape``: by what the job is to go in
    the end; ``shapes``: all that it may have gone by.
    """

    pod_type = Pod

    def __init__(self, loop: SimulatedLoop, shape: JobShape, random: Random) -> None:
        self.loop = loop
        self.shape = self.template = shape
        self.shapes = [shape]
        self.random = random
        self.timeline = Timeline(loop.time)
        self.engine = SimulatedEngine(loop.time)
        self.network = loop.process("network")
        self.weather = Weather()
        self.whole = True
        self.refuses = False
        self.disks_fail = True
        self.sticks = False
        self.sizes = JobPolicy(shape.least, shape.most)
        self.former_sizes = [self.sizes]
        self.paused = False
        self.stages = 1
        self.blocks = 0
        self.sharded = False
        self.start_s = 0.0
        self.back_off_s = 0.0
        self.shards = ShardHistory(self)
        self.changes_in_place = False
        self.machines: Machines | None = None
        self.pods: dict[str, Pod] = {}
        self.strays: list[Pod] = []
        self.replaced: list[Pod] = []
        self.launchers: dict[str, Launchers] = {}
        self.failure: BaseException | None = None
        self.director = loop.process("kubelet")
        self.step_s = random.choice((0.5, 1.5))
        self.last_step: int | None = None
        self.uploads_s: dict[str, float] = {}
        self.worlds: dict[tuple[RoundId, str], World] = {}
        self.invariants: Invariants
        self._uids = 0
        self._numbers = 0

    def go_by(self, shape: JobShape) -> None:
        """Expect these bounds in the end, and worlds of them from now on."""
        self.shape = shape
        self.shapes.append(shape)
        self.sizes = JobPolicy(shape.least, shape.most)
        self.former_sizes.append(self.sizes)

    def add(self, name: str) -> Pod:
        """Start a pod, also under the name of one that has not gone yet."""
        self._uids += 1
        if (former := self.pods.get(name)) is not None and not former.gone:
            self.replaced.append(former)
        # A pod that comes for another one of its name may stand elsewhere.
        where = f"block-{self._uids % self.blocks}/rack-{self._uids % 3}" if self.blocks else ""
        uid = f"uid-{name}{self._uids}"
        pod = self.pods[name] = self.pod_type(self, name, uid, self.template, where)
        pod.start()
        return pod

    def stray(self, name: str, job_uid: str) -> Pod:
        """Start a pod of another Job of this name, one that is deleted."""
        self._uids += 1
        shape = replace(self.template, job_uid=job_uid)
        pod = Pod(self, name, f"uid-{name}{self._uids}", shape)
        self.strays.append(pod)
        pod.start()
        return pod

    def pod(self, name: str) -> Pod:
        """The pod of that name, be it one of a deleted Job; the newest."""
        if name in self.pods:
            return self.pods[name]
        return next(pod for pod in reversed(self.strays) if pod.name == name)

    def pod_of(self, pod_uid: str) -> Pod | None:
        """The pod of that UID, unless another one of its name has come since it went."""
        pods = (*self.pods.values(), *self.replaced, *self.strays)
        return next((pod for pod in pods if pod.pod_uid == pod_uid), None)

    def inside(self, name: str, round: RoundId) -> Pod | None:
        """The pod of that name whose torchrun is in ``round``."""
        pods = [pod for pod in (self.pod(name), *self.replaced) if pod.name == name]
        for pod in pods:
            if pod.torchrun is not None and (pod.torchrun.run, pod.torchrun.real_round) == round:
                return pod
        return None

    def is_stray(self, name: str) -> bool:
        """Whether the pod of that name is one of a deleted Job."""
        return name not in self.pods

    def everybody(self) -> list[Pod]:
        """Pods that are not gone, those of deleted Jobs too."""
        pods = (*self.pods.values(), *self.replaced, *self.strays)
        return [pod for pod in pods if not pod.gone]

    def next_number(self) -> int:
        """Number a process of the training containers."""
        self._numbers += 1
        return self._numbers

    def world_of(self, round: RoundId, master: str, size: int) -> World:
        """The world of ``round`` whose ranks meet at ``master``."""
        key = (round, master)
        if key not in self.worlds:
            last = self.invariants.snapshot.last_commit
            # A stage of the containers has steps of its own.
            start = last.step if last is not None and last.run == round[0] else 0
            world = self.worlds[key] = World(round, size, start)
            world.weights = self.shards.weights(world.start)
        return self.worlds[key]

    @cached_property
    def in_place(self) -> WorldsInPlace:
        """Their worlds, if they change in place."""
        from tests.simulation.in_place import WorldsInPlace

        return WorldsInPlace(self)

    def rank(self, *what: Any, place: int) -> Rank:
        """A rank that its torchrun starts as number ``place``."""
        if not self.changes_in_place:
            return Rank(*what)
        from tests.simulation.in_place import InPlaceRank

        return InPlaceRank(*what, place=place)

    def present(self) -> list[Pod]:
        """Pods of this Job that are not gone."""
        return [pod for pod in self.pods.values() if not pod.gone]

    def set_weather(self, weather: Weather) -> None:
        """Let the network be like this for everybody from now on."""
        self.weather = weather
        for pod in self.everybody():
            if pod.link is not None:
                pod.link.weather = weather

    def cut_all(self, *, refuses: bool) -> None:
        """Take the store away from everybody."""
        self.whole, self.refuses = False, refuses
        for pod in self.everybody():
            if pod.link is not None:
                pod.link.cut(refuses=refuses)

    def mend_all(self) -> None:
        """Give it back to everybody."""
        self.whole = True
        for pod in self.everybody():
            pod.cut_off = False
            if pod.link is not None and not pod.link.whole:
                pod.link.mend()

    def ended(self, task: object) -> None:
        """Take note of how a sidecar ended that was not ended from outside."""
        error = task.exception() if not task.cancelled() else None  # type: ignore[attr-defined]
        if error is not None and self.failure is None:
            self.failure = error
