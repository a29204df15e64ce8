# SPDX-License-Identifier: Apache-2.0
"""Ranks that train in step: nobody finishes a step before all of the world have begun it.

At each boundary a rank does what ``muster.boundary`` says, as ``muster.drain()`` would; between
what it publishes and the gate that it then reads, others have their turns.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from launcher_shim.c10d.rounds.views import NOWHERE_PORT
from launcher_shim.rundir import layout
from launcher_shim.rundir.rank_reports import StepLine
from muster import boundary
from muster.boundary import ENTERED_STEP
from tests.simulation.shards import RankShards
from tests.support.sidecars.boundary_rank import BoundaryRank

if TYPE_CHECKING:
    from tests.simulation.pods import Pod, SimulatedJob

OWN_ROUND_WAIT_S = 5.0
SAVE_S = (0.02, 0.4)
SAVE_EVERY = 3
"""Steps between two periodic checkpoints, which no drain asks for."""
FAILED_SAVES = 0.05
LOOK_S = 0.5


_PROCESSES = count(1)

RoundId = tuple[str, int]
"""The run's id, and the number of the round."""


@dataclass
class Training:
    """How the ranks of one pod train: ``save_s`` is how long a save takes, at least and at most.

    The next ``save_errors`` saves that a drain asks for fail. ``saves_every``: steps between two
    periodic checkpoints, which no drain asks for; 0: none. ``takes_part``: whether its script has
    a ``muster.drain()``. While ``goes`` is clear its ranks stand still, as after SIGSTOP.
    """

    save_s: tuple[float, float] = SAVE_S
    save_errors: int = 0
    saves_every: int = SAVE_EVERY
    takes_part: bool = True
    goes: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.goes.set()


class World:
    """One world that trains: what its ranks have done, by member."""

    def __init__(self, round: RoundId, size: int, start: int) -> None:
        self.round = round
        self.size = size
        self.start = start
        self.ranks: dict[str, Rank] = {}
        self.began: dict[str, int] = {}
        self.trained: dict[str, int] = {}
        self.saved: dict[str, set[int]] = {}
        self.uploaded: set[str] = set()
        self.all_uploaded = asyncio.Event()
        self.weights: tuple[int, ...] = ()
        """Places of shards that its ranks began with, and those trained since, with their steps."""
        self.shards: list[tuple[int, range]] = []
        self._arrivals = 0
        self._all_here = asyncio.Event()

    def contained(self, until: float = math.inf) -> tuple[int, ...]:
        """The places of shards that its weights contain at a step."""
        return (*self.weights, *(p for step, some in self.shards if step <= until for p in some))

    async def begin(self, step: int) -> None:
        """Meet the others in the collective of a step."""
        self._arrivals += 1
        if self._arrivals == self.size:
            self._arrivals = 0
            met, self._all_here = self._all_here, asyncio.Event()
            met.set()
        else:
            await self._all_here.wait()


class Rank(BoundaryRank):
    """One worker process."""

    def __init__(
        self,
        job: SimulatedJob,
        pod: Pod,
        round: RoundId,
        master: str,
        size: int,
        random: Random,
    ) -> None:
        super().__init__(master, pod.run_dir.files)
        self.pod = pod
        self.master = master
        self.round = round
        self.ended = False
        self.finished = False
        self.uploads = False
        self.matched = False
        """Whether it has been shown that its round is complete."""
        self._job = job
        self._random = random
        nowhere = master.endswith(f":{NOWHERE_PORT.decode()}")
        if nowhere:
            job.timeline.add(pod.name, "is in a world of nowhere")
        self.world = job.world_of(round, master, 1_000_000 if nowhere else size)
        self._process = (next(_PROCESSES), 0)
        self._first = ENTERED_STEP
        self._shards: RankShards | None = None
        if job.sharded and not nowhere:
            self._shards = RankShards(job, pod, self.world, master)
        self._task: asyncio.Task[None] | None = None

    def end(self) -> None:
        """Its agent kills it; what it has told stays where it is."""
        self.ended = True
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Train until it is ended, or through with the last step."""
        self._task = asyncio.current_task()
        step = await self._start()
        world, name = self.world, self.pod.name
        world.ranks[name] = self
        while True:
            step += 1
            world.began[name] = step
            self._job.invariants.splits.begins(self, step)
            await world.begin(step)
            if self._shards is not None:
                await self._shards.take(step)
            await asyncio.sleep(self._job.step_s * self._random.uniform(0.5, 1.5))
            await self.pod.training.goes.wait()
            world.trained[name] = step
            self._job.invariants.trained(self, step)
            self._told = boundary.arrive(self._told, step)
            if self._shards is not None:
                self._shards.log.arrive(step)
            await self._publish()
            due = await self._follow()
            while due:
                due = await self._save(step)
            if (every := self.pod.training.saves_every) and step % every == 0:
                await self._save_unasked(step)
            if self._job.last_step is not None and step >= self._job.last_step:
                await self._publish(takes_part=False)
                if name in self._job.uploads_s:
                    await self._upload()
                self.finished = True
                return

    async def _upload(self) -> None:
        """Do what some ranks have left to do after the last step; they end it together."""
        world, uploads_s = self.world, self._job.uploads_s
        self.uploads = True
        await asyncio.sleep(uploads_s[self.pod.name])
        others = uploads_s.keys() & world.ranks.keys()
        world.uploaded.add(self.pod.name)
        if others <= world.uploaded:
            world.all_uploaded.set()
        await world.all_uploaded.wait()

    async def _start(self) -> int:
        if self.pod.launcher == "broken":
            await asyncio.Event().wait()
        self.pod.run_dir.files[layout.IMPORTED] = self.master.encode()
        if self._job.start_s:
            fails = self.pod.launcher == "failing"
            quickest_s = self._job.start_s if fails else 0.0
            await asyncio.sleep(self._random.uniform(quickest_s, self._job.start_s))
        deadline_s = self._job.loop.time() + OWN_ROUND_WAIT_S
        while (gate := self._gate()) is None or gate.master != self.master:
            if self._job.loop.time() >= deadline_s:
                break
            await self._pod_gate_changed(0.2)
        matched = self.matched = gate is not None and gate.master == self.master
        if gate is not None and matched:
            last = gate.last_commit
            self._job.invariants.starts(self, last.step if last is not None else 0)
            if last is not None:
                self._job.invariants.splits.loads(self, last)
        self._told = self._told._replace(step=ENTERED_STEP, matched=matched)
        await self._publish()
        await self._begin()
        # Whoever was told too late loads what the others of its world do.
        return self.world.start

    async def _save(self, step: int) -> bool:
        """Save, and say so; return whether the very same step is to be saved again."""
        await asyncio.sleep(self._random.uniform(*self.pod.training.save_s))
        await self.pod.training.goes.wait()
        fails = self._random.random() < FAILED_SAVES and self._job.disks_fail
        if self.pod.training.save_errors:
            self.pod.training.save_errors -= 1
            fails = True
        if fails:
            self._say(f"could not save step {step}")
            self._told = boundary.fail(self._told, "the disk is full")
        elif self._shards is not None and not await self._shards.save(step):
            self._told = boundary.fail(self._told, "what it contains is not on record")
        else:
            self._say(f"saves step {step}")
            self._note_saved(step)
            self._told = boundary.acknowledge(self._told)
        await self._publish()
        return await self._follow()

    async def _save_unasked(self, step: int) -> None:
        """Save a periodic checkpoint; where that fails, it is not told of."""
        await asyncio.sleep(self._random.uniform(*self.pod.training.save_s))
        if self._random.random() >= FAILED_SAVES or not self._job.disks_fail:
            if self._shards is not None and not await self._shards.save(step):
                return
            self._note_saved(step)
            await self._publish()

    def _note_saved(self, step: int) -> None:
        self.world.saved.setdefault(self.pod.name, set()).add(step)
        self._job.invariants.splits.wrote(self, self._ask_for_tag(), step)
        self._saved.add(step)
        self._job.shards.saved(self.world, step)

    async def _begin(self) -> None:
        if self.pod.training.takes_part:
            await super()._begin()

    async def _follow(self) -> bool:
        return self.pod.training.takes_part and await super()._follow()

    async def _publish(self, *, takes_part: bool = True) -> None:
        if not self.pod.training.takes_part:
            return
        self.pod.run_dir.progress[0] = self._progress(drain=takes_part)
        step = self._told.step
        if self._first == ENTERED_STEP:
            self._first = step
        self.pod.run_dir.told[0] = StepLine(self._process, self._first, step)
        await asyncio.sleep(0)

    async def _look_again(self) -> None:
        await self._pod_gate_changed(LOOK_S)

    async def _pod_gate_changed(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self.pod.run_dir.written.wait()
        except TimeoutError:
            return

    def _say(self, what: str) -> None:
        self._job.timeline.add(self.pod.name, what)
