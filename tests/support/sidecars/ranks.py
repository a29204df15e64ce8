# SPDX-License-Identifier: Apache-2.0
"""Ranks of a pod that drains: each does at its boundaries what ``muster.boundary`` says.

``muster.drain()`` does so too, in processes of its own; these wait in the test's time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from launcher_shim.rundir import layout
from muster import boundary
from muster.boundary import ENTERED_STEP
from muster.progress import TIMED_S
from tests.support.sidecars.boundary_rank import BoundaryRank

if TYPE_CHECKING:
    from tests.support.sidecars.drains import Pod

POLL_S = 0.01
OWN_ROUND_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Loop:
    """How the ranks of one pod train.

    ``saves_every``: steps between two periodic checkpoints; 0: none. After each ``steps_a_loop``
    (0: never) it evaluates, until the job's ``evaluated``. ``of_0_1``: its ``import muster`` knows
    no page.
    """

    step_s: float = 0.05
    save_s: float = 0.05
    saves_every: int = 0
    steps_a_loop: int = 0
    ranks: int = 1
    of_0_1: bool = False


class Rank(BoundaryRank):
    """One rank of one round. ``log``: what it has done, with the step; it outlives the rank.

    While ``going`` is clear it stands still, as after SIGSTOP.
    """

    def __init__(self, pod: Pod, master: str, local_rank: int, loop: Loop, seed: str) -> None:
        super().__init__(master, pod.files)
        self.log: list[tuple[str, int]] = []
        self.going = asyncio.Event()
        self.going.set()
        self._pod = pod
        self._local_rank = local_rank
        self._loop = loop
        self._random = Random(seed)
        self._former: boundary.Rank | None = None
        if loop.of_0_1:
            self._reads = layout.GATE
        self._task = asyncio.create_task(self._run(), name=f"rank of {pod.name}")

    async def end(self) -> None:
        """End it at once; what it has told stays."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        step = await self._start()
        self.log.append(("begin", step))
        while True:
            last = step + self._loop.steps_a_loop if self._loop.steps_a_loop else None
            step = await self._train(step, last)
            self.log.append(("evaluate", step))
            await self._pod.job.evaluated.wait()

    async def _start(self) -> int:
        """The step to go on from: that of the last commit, once the gate is of this round."""
        deadline_s = self._pod.job.clock() + OWN_ROUND_WAIT_S
        while (gate := self._gate()) is None or gate.master != self._told.master:
            if self._pod.job.clock() >= deadline_s:
                return 0
            await self._wait(POLL_S)
        self._told = self._told._replace(matched=True)
        return gate.last_commit.step if gate.last_commit is not None else 0

    async def _train(self, step: int, last: int | None) -> int:
        """One loop within ``muster.drain()``."""
        if self._former is not None:
            self._told = boundary.enter_again(self._former)
        else:
            self._told = self._told._replace(step=ENTERED_STEP)
        await self._publish()
        await self._begin()
        while last is None or step < last:
            step += 1
            await self._wait(self._loop.step_s * self._random.uniform(0.2, 1.8))
            self.log.append(("step", step))
            self._told = boundary.arrive(self._told, step)
            await self._publish()
            due = await self._follow()
            while due:
                due = await self._save(step)
            if self._loop.saves_every and step % self._loop.saves_every == 0:
                began_s = asyncio.get_running_loop().time()
                await self._wait(self._loop.save_s * self._random.uniform(0.2, 1.8))
                took_s = asyncio.get_running_loop().time() - began_s
                self._save_s = round(took_s, 1) if took_s >= TIMED_S else 0.0
                self._note_saved(step)
                await self._publish()
        await self._publish(drain=False, away=True)
        self._former = self._told
        return step

    async def _save(self, step: int) -> bool:
        """Return whether the very same step is to be saved again."""
        await self._wait(self._loop.save_s * self._random.uniform(0.2, 1.8))
        self._note_saved(step)
        self._told = boundary.acknowledge(self._told)
        await self._publish()
        return await self._follow()

    def _note_saved(self, step: int) -> None:
        self.log.append(("save", step))
        self._saved.add(step)

    async def _look_again(self) -> None:
        await self._wait(POLL_S)

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.going.wait()

    async def _publish(self, *, drain: bool = True, away: bool = False) -> None:
        self._pod.progress[self._local_rank] = self._progress(
            self._local_rank, self._loop.ranks, drain=drain, away=away
        )
