# SPDX-License-Identifier: Apache-2.0
"""Pods that drain: their sidecars' parts, and ranks that train, on one engine of the store.

Only the launcher is played: its round is written where a launcher's endpoint writes it, and whoever
may go is ended as ``muster-run`` would end it. What must hold in every test is looked at in each.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from agent.drain.notice import Notice, Phase, Source
from agent.parts import drains_of, job_client, member_parts
from agent.surroundings import MemberSettings
from launcher_shim.c10d.rounds.mirrored_run import own
from launcher_shim.c10d.rounds.records import Node, Round, Seat
from launcher_shim.rundir import layout
from rdzv.drain.inputs import LiveRound, LiveRounds
from rdzv.job import JobClient
from rdzv.records.drain import Commit, Drain
from rdzv.records.job import HistoryEntry
from rdzv.snapshot import Snapshot, listing_of
from rdzv.store import Operation, Put, WatchEvent
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.sidecars.cable import Cable, CabledStore
from tests.support.sidecars.jobs import KEYS, identity, surroundings
from tests.support.sidecars.ranks import Loop, Rank
from tests.support.sidecars.run_dir import MemoryRunDir

RUN = "digits"
HERE = KEYS.in_generation(1)
FIRST_PORT = 20_000
"""``MASTER_PORT`` of round 0; it names the round, nobody listens there."""

LEASE_TTL_S = 60.0
"""No test of drains waits for a lease to end."""

PLAIN = Loop()

DEADLINE_S = 90.0
"""Ends what hangs."""


class Rounds:
    """What drains ask of an endpoint, made of the round and the nodes as the mirror shows them."""

    def __init__(self, client: JobClient, member: str) -> None:
        self._client = client
        self._member = member

    async def caught_up(self) -> None:
        """The mirror is never behind itself."""

    def live_rounds(self) -> LiveRounds:
        """There is one run."""
        round = self._live_round()
        return LiveRounds(round, None if round is None else own([round], self._member))

    def _live_round(self) -> LiveRound | None:
        snapshot, mirror = self._client.membership.snapshot(), self._client.mirror
        keys = KEYS.in_generation(snapshot.job.generation if snapshot.job else 1).run(RUN)
        kv = mirror.kvs.get(keys.round)
        if kv is None:
            return None
        current = Round.from_kv(kv)
        nodes = {node.member: node for node in map(Node.from_kv, mirror.under(keys.nodes))}
        members = tuple(seat.member for seat in current.frozen)
        listed = {member.name for member in listing_of(snapshot).listed}
        asking = {name for name, node in nodes.items() if node.state == "asking"}
        return LiveRound(
            run=RUN,
            number=current.number,
            complete=current.complete,
            members=members,
            left=frozenset(m for m in members if m in nodes and nodes[m].state == "left"),
            reforms="join" if (asking & listed) - {*members} else "",
            finishing=current.finishing,
            closed=bool(current.closed),
            master=master_of(current.number),
            mod_revision=current.mod_revision,
            asking=frozenset(asking & listed),
        )

    def ranks_at(self, round: LiveRound, step: int) -> bool:
        """No newcomer waits for them."""
        return False

    async def live_rounds_changed(self, known: LiveRounds) -> LiveRounds:
        mirror = self._client.mirror
        while (now := self.live_rounds()) == known:
            await mirror.changed_after(mirror.sequence)
        return now


def master_of(number: int) -> str:
    return f"127.0.0.1:{FIRST_PORT + number}"


class PodRunDir(MemoryRunDir):
    """The run directory of one pod, on a disk that may be full."""

    def __init__(self, pod: Pod) -> None:
        super().__init__()
        self.files, self.progress = pod.files, pod.progress
        self._pod = pod

    def _write(self, name: str, content: bytes, mode: int) -> None:
        if self._pod.disk_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._write(name, content, mode)


class Pod:
    """One pod: a sidecar that can be killed, and ranks beside it.

    ``files`` and ``progress`` are its run directory's.
    """

    def __init__(self, job: Job, name: str, notice_path: Path | None) -> None:
        self.name = name
        self.uid = f"uid-{name}"
        self.job = job
        self.files: dict[str, bytes] = {}
        self.progress: dict[int, Any] = {}
        self.disk_full = False
        self.ranks: list[Rank] = []
        self.cable = Cable()
        self._notice_path = notice_path
        self._tasks: list[asyncio.Task[object]] = []

    async def start(self) -> None:
        """Start its sidecar."""
        self.run_dir = PodRunDir(self)
        self.store = CabledStore(self.job.engine, self.cable)
        around = surroundings(self.store, self.name)
        who = identity(self.name, self.uid, least=self.job.least, most=8)
        settings = MemberSettings(
            keys=KEYS,
            identity=replace(
                who, job_uid="uid-digits", node=self.job.nodes.get(self.name, who.node)
            ),
            lease_ttl_s=self.job.lease_ttl_s,
            grace_s=self.job.grace_s,
            below_min=self.job.below_min,
            when_stuck=self.job.when_stuck,
        )
        self.client = client = job_client(around, KEYS)
        self.mirror, self.membership = client.mirror, client.membership
        self.mirror.subscribe(lambda events: self.job.look(self.membership.snapshot()))
        member = member_parts(around, settings, client)
        self.registrar, self.kernel = member.registrar, member.kernel
        self.drains = drains_of(
            *(around, settings, member),
            rounds=Rounds(client, self.name),
            run_dir=self.run_dir,
            notice_path=self._notice_path,
        )
        self._tasks = [
            asyncio.create_task(client.watching.run()),
            asyncio.create_task(self.registrar.run()),
            asyncio.create_task(self.drains.run()),
        ]
        await self.drains.notices.listening.wait()

    async def kill(self) -> None:
        """End the sidecar at once: no goodbye, nothing finished."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    @property
    def defects(self) -> list[BaseException]:
        """What ended a task of the sidecar."""
        ended = [task for task in self._tasks if task.done() and not task.cancelled()]
        return [error for task in ended if (error := task.exception()) is not None]

    async def soon(self, holds: Callable[[], object]) -> None:
        """Wait until something holds that has no event to tell of it."""
        async with asyncio.timeout(DEADLINE_S):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def notice(self, source: Source, left_s: float | None = None, reason: str = "test") -> Client:
        """Give notice, and listen."""
        return Client(self, Notice(source, reason, left_s))

    def steps(self, what: str, number: int | None = None, local_rank: int = 0) -> list[int]:
        """The steps of one kind that a rank of round ``number`` (the present one) has logged."""
        number = self.job.number if number is None else number
        log = self.job.ranks_of[number][self.name, local_rank].log
        return [step for kind, step in log if kind == what]

    @property
    def drain(self) -> Drain | None:
        """Its drain, as the store has it."""
        return self.job.snapshot.drains.get(self.uid)

    def shown(self, name: str = layout.GATE_PAGE) -> object:
        """The phase of the gate that its ranks read."""
        return json.loads(self.files[name])["phase"]

    def kept(self) -> dict[str, Any] | None:
        """What the run directory has of its drain."""
        content = self.files.get(layout.DRAIN)
        return None if content is None else json.loads(content)

    def stop_ranks(self) -> None:
        """Do as SIGSTOP does to them."""
        for rank in self.ranks:
            rank.going.clear()

    def resume_ranks(self) -> None:
        """Do as SIGCONT does to them."""
        for rank in self.ranks:
            rank.going.set()

    async def end_ranks(self) -> None:
        """Let the launcher's command end."""
        ranks, self.ranks = self.ranks, []
        for rank in ranks:
            await rank.end()


class Client:
    """The client of a notice. ``phases``: those it has received."""

    def __init__(self, pod: Pod, notice: Notice) -> None:
        self.phases: list[str] = []
        self._pod = pod
        self._own = pod.drains.own
        self._own.notify(notice)
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> Phase:
        phase = None
        while phase is None or not phase.last:
            phase = await self._own.phase_after(phase)
            self.phases.append(phase.name)
        return phase

    async def last(self) -> Phase:
        """Wait for the last phase."""
        async with asyncio.timeout(DEADLINE_S):
            return await self._task

    async def release(self) -> str:
        """Wait for the last phase, end the ranks where it is a release; return the outcome."""
        phase = await self.last()
        if phase.name == "released":
            await self._pod.end_ranks()
        return phase.outcome

    def leave(self) -> None:
        """Go away."""
        self._task.cancel()


@dataclass
class Job:
    """All of it. ``granted`` and ``done`` are what a watch of the store has shown of them."""

    engine: MemoryEngine
    clock: Callable[[], float]
    least: int
    grace_s: float
    below_min: Literal["hold", "commit"]
    lease_ttl_s: float
    when_stuck: Literal["tell", "reform"]
    nodes: Mapping[str, str] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    number: int = -1
    done: list[tuple[int, int]] = field(default_factory=list)
    ended_rounds: set[int] = field(default_factory=set)
    commits: list[Commit] = field(default_factory=list)
    drained: set[str] = field(default_factory=set)
    ranks_of: dict[int, dict[tuple[str, int], Rank]] = field(default_factory=dict)
    evaluated: asyncio.Event = field(default_factory=asyncio.Event)
    _wrongly_listed: set[str] = field(default_factory=set)

    def follow(self) -> None:
        """Watch the store, as somebody who has no part in it."""
        store = self._store = MemoryStore(self.engine)
        client = self._client = JobClient.of(store, KEYS, clock=self.clock)
        self.mirror = client.mirror
        self.mirror.subscribe(self._see)
        self._watching = asyncio.create_task(client.watching.run())

    async def end(self) -> None:
        """End all of it."""
        for pod in self.pods.values():
            await pod.kill()
            await pod.end_ranks()
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)

    @property
    def snapshot(self) -> Snapshot:
        return self._client.membership.snapshot()

    @property
    def commit(self) -> Commit:
        return self.snapshot.commit or Commit()

    def phase_is(self, phase: str) -> Callable[[], bool]:
        return lambda: self.commit.phase == phase

    def history(self) -> list[HistoryEntry]:
        """What is kept of drains."""
        entries = map(HistoryEntry.from_kv, self.mirror.under(KEYS.history))
        return [entry for entry in entries if entry.what == "drain"]

    async def put(self, *operations: Operation) -> None:
        """Write something, as whoever else might."""
        assert (await MemoryStore(self.engine).txn([], operations)).succeeded

    async def form(self, names: str, loop: Loop = PLAIN, **own: Loop) -> None:
        """Let these be the next world: a round on record, ranks that train in it."""
        for pod in self.pods.values():
            await pod.end_ranks()
        self.number += 1
        frozen = tuple(Seat(name, "n", 1) for name in names)
        await self.put(Put(HERE.run(RUN).round, Round(self.number, True, frozen=frozen).to_json()))
        world = self.ranks_of[self.number] = {}
        for name in names:
            pod, its = self.pods[name], own.get(name, loop)
            for local_rank in range(its.ranks):
                seed = f"{self.number}-{name}-{local_rank}"
                rank = Rank(pod, master_of(self.number), local_rank, its, seed)
                world[name, local_rank] = rank
                pod.ranks.append(rank)

    async def add(self, name: str, notice_path: Path | None = None) -> None:
        """Start another pod, and wait until it is a member."""
        pod = self.pods[name] = Pod(self, name, notice_path)
        await pod.start()
        await self.until(lambda: name in self.snapshot.members)

    async def ask(self, name: str) -> None:
        """Let a launcher wait for the next round."""
        node = Node(name, "asking", "n", 1, "127.0.0.1", 1, 0)
        await self.put(Put(HERE.run(RUN).node(name), node.to_json()))

    async def training(self, steps: int = 3) -> None:
        """Wait until every rank of the present round has come so far."""
        for name, local_rank in self.ranks_of[self.number]:
            await self._trained(name, local_rank, steps)

    async def goes_on(self) -> None:
        """Wait until every rank of the present round has come further than it is now."""
        for name, local_rank in self.ranks_of[self.number]:
            steps = len(self.pods[name].steps("step", None, local_rank))
            await self._trained(name, local_rank, steps + 3)

    async def _trained(self, name: str, local_rank: int, steps: int) -> None:
        pod = self.pods[name]
        await pod.soon(lambda: len(pod.steps("step", None, local_rank)) >= steps)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until the watched store is as wished."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not holds():
                    await self.mirror.changed_after(self.mirror.sequence)
        except TimeoutError:
            raise AssertionError(
                f"the store stays at {self.commit} {self.snapshot.drains}"
            ) from None

    # -- what must hold whatever happens

    def _see(self, events: Sequence[WatchEvent]) -> None:
        snapshot = self.snapshot
        self.look(snapshot)
        for event in events:
            if event.kind == "put" and event.kv.key == HERE.commit and snapshot.commit:
                self.commits.append(snapshot.commit)
                if snapshot.commit.granted or snapshot.commit.admitted:
                    self.ended_rounds.add(snapshot.commit.round)
            if event.kind == "put" and event.kv.key == KEYS.last_commit and snapshot.last_commit:
                self.done.append((snapshot.last_commit.round, snapshot.last_commit.step))

    def look(self, snapshot: Snapshot) -> None:
        """Take one watched snapshot in: who drains in it, or did before, must not be listed."""
        self.drained |= snapshot.drains.keys()
        self._wrongly_listed |= {
            member.pod_uid
            for member in listing_of(snapshot).listed
            if member.pod_uid in snapshot.drains
        }

    def check(self) -> None:
        """Raise where an invariant was broken, or a sidecar met a defect."""
        assert self._wrongly_listed == set()
        for pod in self.pods.values():
            assert pod.defects == []
        for number, step in self.done:
            for name, local_rank in self.ranks_of[number]:
                saved = self.pods[name].steps("save", number, local_rank)
                assert step in saved, f"{name}/{local_rank} saved {saved}, and {step} is done"
        for number in self.ended_rounds:
            step = max(step for at, step in self.done if at == number)
            for name, local_rank in self.ranks_of[number]:
                trained = max(self.pods[name].steps("step", number, local_rank))
                assert trained == step, f"{name}/{local_rank} trained {trained}, beyond {step}"


@asynccontextmanager
async def job(
    names: str = "abc",
    least: int = 1,
    grace_s: float = 30.0,
    below_min: Literal["hold", "commit"] = "hold",
    trains: str = "",
    loop: Loop = PLAIN,
    notice_path: Path | None = None,
    lease_ttl_s: float = LEASE_TTL_S,
    nodes: Mapping[str, str] | None = None,
    when_stuck: Literal["tell", "reform"] = "tell",
    **own: Loop,
) -> AsyncIterator[Job]:
    """Start a sidecar for each name; those of ``trains`` form a world.

    ``notice_path``: where the last one takes notices by a socket, too. ``nodes``: the machine of
    each, where they have different ones.
    """
    clock = asyncio.get_running_loop().time
    one = Job(
        *(MemoryEngine(clock), clock, least, grace_s, below_min, lease_ttl_s),
        *(when_stuck, nodes or {}),
    )
    one.follow()
    try:
        for name in names:
            await one.add(name, notice_path if name == names[-1] else None)
        if trains:
            await one.form(trains, loop, **own)
            await one.training()
        yield one
        one.check()
    finally:
        await one.end()
