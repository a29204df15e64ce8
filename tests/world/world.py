# SPDX-License-Identifier: Apache-2.0
"""A job of whole sidecars, torchruns and ranks in one thread and virtual time, that does as told.

It is the simulation (``docs/simulation.md``) with a fixed script in place of a seed's: the same
pods, the same network, the same invariants after every revision and every turn.

    async def test_i1_two_leave_while_one_joins(world: World) -> None:
        job = await world.job("abc", least=2)
        await job.trains(20)
        job["a"].sigterm(grace_s=30)
        job["b"].sigterm(grace_s=30)
        job.add("d")
        await job.settles()
        assert job.lost == 0
        assert job.world == "cd"
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

from agent.drain.notice import Notice, Source
from launcher_shim.rundir import layout
from rdzv.drain.gate import Gate
from rdzv.drain.transactions import cancel
from rdzv.errors import StoreError, StoreUnavailable
from rdzv.records.drain import Commit, Drain, LastCommit
from rdzv.records.job import HistoryEntry
from rdzv.snapshot import Snapshot
from rdzv.store import Operation, Put
from rdzv.store.memory.client import transact
from tests.simulation.invariants import Invariants
from tests.simulation.network import Backup
from tests.simulation.nodes import KEYS, JobShape
from tests.simulation.plot import Launchers, Plot
from tests.simulation.pods import Pod, SimulatedJob
from tests.simulation.ranks import World as RankWorld
from tests.simulation.story import Story
from tests.simulation.torchrun import RUN
from tests.support.clocks.virtual import ScriptedLoop
from tests.support.records import by_policy

STEP_S = 0.5
LONGEST_S = 600.0
"""Ends a wait for what never comes, in virtual time."""

HERE = KEYS.in_generation(1)
ENDS_S = 5.0
"""How long a scenario goes on after its last line, for the invariants."""


class ScriptedPod(Pod):
    """One pod, and what may happen to it."""

    _job: Job

    def sigterm(self, grace_s: float) -> None:
        """Do as a kubelet does that ends the pod."""
        self.terminate(grace_s, "sigterm")

    def drained(self, left_s: float) -> None:
        """Give notice by hand, as ``muster drain`` in the pod does."""
        self.terminate(left_s, "control")

    def notify(self, source: Source, left_s: float | None = None, reason: str = "test") -> None:
        """Give notice to the sidecar alone, and go away; nothing ends the pod."""
        sidecar = self.sidecar
        assert sidecar is not None
        notice = Notice(source, reason, left_s)
        self._job.loop.call_soon(sidecar.own.notify, notice, context=sidecar.process.context)

    def restart(self) -> None:
        """Let the sidecar crash, and start another one at once."""
        self.crash()
        self.start()

    def cut(self, *, refuses: bool = False) -> None:
        """Let nothing pass between the pod and the store."""
        assert self.link is not None
        self._job.timeline.add(self.name, "is cut off")
        self.cut_off = True
        self.link.cut(refuses=refuses)

    def mend(self) -> None:
        """Let it reach the store again."""
        self._job.timeline.add(self.name, "reaches the store again")
        self.cut_off = False
        if self.link is not None:
            self.link.mend()

    def lose(self) -> None:
        """Lose its machine, silently, with all that is on it."""
        assert self._job.machines is not None
        self._job.machines.part(self, self._job.present())
        self.die()

    def part(self, others: str, *, silent: bool = True) -> None:
        """Let its machine not reach those of others; not ``silent``: lines break, and are back."""
        machines, pods = self._job.machines, [self._job[name] for name in others]
        assert machines is not None
        machines.part(self, pods)
        if not silent:
            machines.join(self, pods)

    def meet(self, others: str) -> None:
        """Let its machine reach those of others again."""
        assert self._job.machines is not None
        self._job.machines.join(self, [self._job[name] for name in others])

    def end_torchrun(self, after_s: float = 1.0) -> None:
        """Kill the training container; a kubelet starts it again."""
        self.end_container()
        self._after(after_s, self.start_container)

    def order(self, what: str) -> None:
        """Let its workers fail: ``rejoin`` with restarts left, ``fail`` without."""
        assert self.torchrun is not None
        self._job.invariants.rounds.may_close |= what == "fail"
        self.torchrun.order(what)

    def freeze(self) -> Callable[[], None]:
        """Stop the sidecar; return what lets it go on."""
        assert self.sidecar is not None
        process = self.sidecar.process
        process.frozen = True
        self._job.timeline.add(self.name, "its sidecar freezes")
        return lambda: self._job.loop.thaw(process)

    def refuse_writes(self, prefix: str = "", error: StoreError | None = None) -> None:
        """Let the store take no write of it under ``prefix``; all is read as before."""

        def refuse(operations: Sequence[Operation]) -> None:
            if any(operation.key.startswith(prefix) for operation in operations):
                raise error or StoreUnavailable("etcdserver: mvcc: database space exceeded")

        assert self.link is not None
        self.link.on_txn = refuse

    def take_writes(self) -> None:
        """Let the store take all its writes again."""
        assert self.link is not None
        self.link.on_txn = lambda operations: None

    def crash_at_write(self, prefix: str) -> None:
        """Let the sidecar crash as it is about to write under ``prefix``, and start anew."""

        def crash(operations: Sequence[Operation]) -> None:
            if any(operation.key.startswith(prefix) for operation in operations):
                self.crash()
                self._job.loop.call_later(1.0, self.start, context=self._job.director.context)
                raise StoreUnavailable("crashed")

        assert self.link is not None
        self.link.on_txn = crash

    @property
    def gate(self) -> str:
        """The phase of the gate that its ranks read."""
        shown = self.run_dir.gate()
        return "" if shown is None else Gate.from_json(layout.GATE, shown).phase

    @property
    def not_ready(self) -> str | None:
        """Why its sidecar is not ready; None if it is."""
        return self._running()._parts.not_ready()

    @property
    def upholds(self) -> bool:
        """Whether its sidecar renews a lease of the one before it, and is not registered itself."""
        registrar = self._running().registrar
        return registrar.upheld and not registrar.registered.is_set()

    @property
    def drain(self) -> Drain | None:
        """Its drain, as the store has it."""
        return self._job.snapshot.drains.get(self.pod_uid)

    @property
    def steps(self) -> int:
        """The last step that its rank has made in the present world; 0: none."""
        world = self._job.ranks
        return world.trained.get(self.name, 0) if world is not None else 0

    @property
    def start_step(self) -> int | None:
        """The step that its present world began with, if it trains in one."""
        rank = self.torchrun.rank if self.torchrun is not None else None
        return None if rank is None or rank.ended else rank.world.start

    def saved(self) -> set[int]:
        """The steps that its rank has saved in the present world."""
        world = self._job.ranks
        return world.saved.get(self.name, set()) if world is not None else set()


class Job(SimulatedJob):
    """All of it, as a script speaks of it."""

    pods: dict[str, ScriptedPod]  # type: ignore[assignment]
    pod_type = ScriptedPod
    loop: ScriptedLoop

    def __init__(self, loop: ScriptedLoop, shape: JobShape, random: Random, plot: Plot) -> None:
        super().__init__(loop, shape, random)
        self.disks_fail = False
        self.step_s = STEP_S
        self.story = Story(self, Invariants(self), Random(random.random()), plot)
        self.story.set_scene()
        self.commits: list[Commit] = []
        self._waits: list[tuple[Callable[[], object], Callable[[], None]]] = []
        self._checks, loop.after_turn = loop.after_turn, self._after_turn
        self._looking = asyncio.create_task(self._look())

    def __getitem__(self, name: str) -> ScriptedPod:
        return self.pods[name]

    # -- what happens

    def add(self, name: str) -> ScriptedPod:
        """Start a pod and its launcher, also in the place of one of that name."""
        pod = super().add(name)
        assert isinstance(pod, ScriptedPod)
        if self.story.plot.trains:
            pod.start_container()
        return pod

    def cut(self, *, refuses: bool = False) -> None:
        """Take the store away from all."""
        self.timeline.add("script", "the store is out of reach for all")
        self.cut_all(refuses=refuses)

    def mend(self) -> None:
        """Give it back to all."""
        self.timeline.add("script", "the store is back for all")
        self.mend_all()

    def lose_store(self, backup: Backup) -> None:
        """Let the store be what it was at the time of ``backup``."""
        self.timeline.add("script", f"the store is restored to revision {backup.revision}")
        self.cut_all(refuses=True)
        self.engine.restore(backup)
        self.invariants.restored()
        self.mend_all()

    def refuse_writes(self) -> None:
        """Let the store take no writes of the pods; all is read as before."""
        for pod in self.pods.values():
            pod.refuse_writes()

    def take_writes(self) -> None:
        """Let the store take all writes again."""
        for pod in self.pods.values():
            pod.take_writes()

    def put(self, *operations: Operation) -> None:
        """Write something, as whoever else might."""
        assert transact(self.engine, (), operations).succeeded

    def set(self, **changes: Any) -> None:
        """Change what the job is to be, as ``muster scale`` and ``muster pause`` do."""
        stored = self.snapshot.job
        assert stored is not None
        changed = by_policy(stored, **changes)
        policy = changed.policy
        self.go_by(replace(self.shape, least=policy.min_nodes, most=policy.max_nodes))
        self.sizes = policy
        self.former_sizes.append(self.sizes)
        self.paused = changed.paused
        self.put(Put(KEYS.job, changed.to_json()))

    def cancel(self, name: str) -> None:
        """Do as ``muster drain --cancel`` does."""
        planned = cancel(KEYS, self.snapshot, self[name].pod_uid)
        assert not isinstance(planned, str), planned
        assert transact(self.engine, *planned).succeeded

    def when(self, holds: Callable[[], object], act: Callable[[], object]) -> None:
        """Let ``act`` happen at the very moment when ``holds`` does first."""

        def once() -> None:
            self._waits.remove(entry)
            self.loop.director.context.run(act)

        entry = (holds, once)
        self._waits.append(entry)

    # -- what is waited for

    async def until(self, holds: Callable[[], object], within_s: float = LONGEST_S) -> None:
        """Wait until ``holds`` does; it is looked at after each turn of a process."""
        if holds():
            return
        met: asyncio.Future[None] = self.loop.create_future()
        self.when(holds, lambda: met.set_result(None))
        async with asyncio.timeout(within_s):
            await met

    async def passes(self, seconds: float) -> None:
        """Let time pass."""
        await asyncio.sleep(seconds)

    async def phase(self, phase: str) -> None:
        """Wait until the commit is in that phase."""
        await self.until(lambda: self.commit.phase == phase)

    async def trains(self, steps: int = 5) -> None:
        """Wait until a world of all that ask has made so many more steps."""
        await self.until(lambda: self.ranks is not None and self._all_began())
        world = self.ranks
        assert world is not None
        last = self.step + steps
        await self.until(lambda: self.ranks is not world or self.step >= last)
        if self.ranks is not world:
            await self.trains(steps)

    async def stands(self) -> None:
        """Wait until no rank makes a step any more."""
        made = -1
        while made != (made := self.made):  # noqa: ASYNC110
            await asyncio.sleep(2.0)

    async def ends(self, *names: str) -> None:
        """Wait until these pods are gone."""
        await self.until(lambda: all(self[name].gone for name in names))

    async def settles(self) -> None:
        """Wait until everything has come right, and a world trains on."""
        await self.story.settle()

    # -- what is so

    @property
    def snapshot(self) -> Snapshot:
        """The store's word at this moment."""
        return self.invariants.snapshot

    @property
    def commit(self) -> Commit:
        """The commit, as the store has it."""
        return self.snapshot.commit or Commit()

    @property
    def done(self) -> list[int]:
        """The steps that a drain or a join has had all ranks save, in order."""
        return [at.step for at in self.commits if at.phase == "done" and at.step is not None]

    @property
    def last_commit(self) -> LastCommit | None:
        """The step that is saved, as the store has it."""
        return self.snapshot.last_commit

    @property
    def round(self) -> int:
        """The number of the newest round."""
        return self.invariants.rounds.round.number

    @property
    def world(self) -> str:
        """The names of those who are in the newest complete round, in the order of the alphabet."""
        current = self.invariants.rounds.round
        return "".join(sorted(seat.member for seat in current.frozen)) if current.complete else ""

    @property
    def formed(self) -> list[str]:
        """The names of those who were in each round, the oldest first."""
        frozen = self.invariants.rounds.frozen
        ours = sorted(number for run, number in frozen if run == RUN)
        return ["".join(sorted(s.member for s in frozen[RUN, number])) for number in ours]

    @property
    def ranks(self) -> RankWorld | None:
        """The ranks of the newest round that has any."""
        ours = [world for (round, _), world in self.worlds.items() if round[0] == RUN]
        return max(ours, key=lambda world: world.round[1], default=None)

    @property
    def step(self) -> int:
        """The last step that all ranks of the newest world have made."""
        return _whole(self.ranks) if self.ranks is not None else 0

    @property
    def made(self) -> int:
        """The steps that ranks of all worlds have made."""
        return sum(sum(world.trained.values()) for world in self.worlds.values())

    @property
    def lost(self) -> int:
        """How many steps that a whole world had made were not in the next one."""
        ours = [world for (round, _), world in self.worlds.items() if round[0] == RUN]
        ours.sort(key=lambda world: world.round[1])
        return sum(max(0, _whole(a) - b.start) for a, b in pairwise(ours))

    def history(self, what: str = "drain") -> list[HistoryEntry]:
        """What is kept of drains, or of something else; the oldest first."""
        entries = map(HistoryEntry.from_kv, self.invariants.truth.under(KEYS.history))
        return [entry for entry in entries if entry.what == what]

    # -- how

    def _all_began(self) -> bool:
        world = self.ranks
        return world is not None and len(world.ranks) == world.size

    def _after_turn(self) -> None:
        self._checks()
        if (commit := self.snapshot.commit) and (not self.commits or commit != self.commits[-1]):
            self.commits.append(commit)
        for holds, act in list(self._waits):
            if holds():
                act()

    async def _look(self) -> None:
        while True:
            self.invariants.look()
            await asyncio.sleep(1.0)


def _whole(world: RankWorld) -> int:
    made = [world.trained.get(name, world.start) for name in world.ranks]
    return min(made) if len(made) == world.size else world.start


class World:
    """Makes the job of a scenario. ``seed``: the order of turns, and how long everything takes."""

    def __init__(self, loop: ScriptedLoop, seed: int) -> None:
        self._loop = loop
        self._seed = seed
        self._job: Job | None = None

    async def job(
        self,
        names: str,
        *,
        least: int = 1,
        most: int = 8,
        patience_s: float = 0.0,
        launchers: Mapping[str, Launchers] | None = None,
        plot: Mapping[str, Any] | None = None,
        **shape: Any,
    ) -> Job:
        """Start a pod for each name, and their launchers once all are members.

        ``patience_s``: for so long the script lets ranks stand still on purpose. ``shape``: see
        ``JobShape``; ``plot``: see ``Plot``.
        """
        kind = replace(Plot("scripted", {}, (len(names),)), **plot or {})
        job = Job(self._loop, JobShape(least, most, **shape), Random(self._seed), kind)
        self._job = job
        job.invariants.liveness.patience_s = patience_s
        job.launchers.update(launchers or {})
        for name in names:
            super(Job, job).add(name)
        await job.until(lambda: len(job.snapshot.members) == len(names))
        if kind.trains:
            for pod in job.present():
                pod.start_container()
        return job

    @property
    def timeline(self) -> str:
        """What has happened."""
        return self._job.timeline.text() if self._job is not None else ""

    async def check(self) -> None:
        """See the invariants hold for a while after the script's last line."""
        if self._job is not None:
            await asyncio.sleep(ENDS_S)

    async def end(self) -> None:
        """Unwind all tasks."""
        self._loop.revive()
        mine = asyncio.current_task()
        while tasks := asyncio.all_tasks() - {mine}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1.0)
