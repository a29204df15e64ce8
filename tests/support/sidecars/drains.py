# SPDX-License-Identifier: Apache-2.0
"""Pods that drain: their sidecars' parts on one engine of the store, their ranks real processes.

Only the launcher is played: its round is written where a launcher's endpoint writes it, and whoever
may go is sent SIGTERM as ``muster-run`` would. What must hold in every test is looked at in each.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

from agent.parts import drains_of, job_client, member_parts
from agent.surroundings import MemberSettings
from launcher_shim.c10d.rounds.records import Node, Round, Seat
from launcher_shim.rundir import layout
from rdzv.errors import RecordError
from rdzv.job import JobClient
from rdzv.listing import decide
from rdzv.members.registration import Held
from rdzv.records.commit import Commit, LastCommit, Vote
from rdzv.records.drain import Drain
from rdzv.records.history import HistoryEntry
from rdzv.snapshot import Snapshot
from rdzv.store import Operation, Put, WatchEvent
from rdzv.store.intervals import Interval
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.clocks.awake_clock import awake_clock
from tests.support.sidecars.drain_parts import (
    FIRST_PORT,
    HERE,
    RUN,
    Cable,
    CabledStore,
    MortalRunDir,
    Rounds,
)
from tests.support.sidecars.jobs import KEYS, identity, surroundings
from tests.support.sidecars.processes import PATIENCE_S

ROOT = Path(__file__).parents[3]

LEASE_TTL_S = 60
"""No test of drains waits for a lease to end."""

Line = dict[str, object]


@dataclass(frozen=True, slots=True)
class Told:
    """A line that a client of the notice socket got, and the store at that moment."""

    line: Line
    votes: dict[str, Vote]
    last_commit: LastCommit | None


class Pod:
    """One pod: a sidecar that can be killed and started again, and ranks beside it."""

    def __init__(self, job: Job, name: str, run_dir: Path) -> None:
        self.name = name
        self.uid = f"uid-{name}"
        self.job = job
        self.run_dir = run_dir
        self.ranks: list[asyncio.subprocess.Process] = []
        self.cable = Cable()
        self.held: Held | None = None
        self._tasks: list[asyncio.Task[object]] = []

    def deliver(self) -> None:
        """Make the run directory."""
        (self.run_dir / "progress").mkdir(parents=True)
        (self.run_dir / "env").touch()

    async def start(self, *, cut: bool = False) -> None:
        """Start its sidecar, beside whatever the one before it left in the run directory."""
        self.cable = Cable()
        if cut:
            self.cable.cut()
        self._files = MortalRunDir(str(self.run_dir))
        self.store = CabledStore(self.job.engine, self.cable)
        # The gate's deadline is of the same clock, not the boot clock: no rank here looks at it.
        around = surroundings(self.store, self.name, self.job.clock)
        who = identity(self.name, self.uid, least=self.job.least, most=self.job.most)
        settings = MemberSettings(
            keys=KEYS,
            identity=replace(who, job_uid="uid-digits"),
            lease_ttl_s=LEASE_TTL_S,
            grace_s=self.job.grace_s,
            below_min=self.job.below_min,
        )
        self._client = client = job_client(around, KEYS)
        self.mirror, self.membership = client.mirror, client.membership
        self.mirror.subscribe(lambda events: self.job.look(self.membership.snapshot()))
        member = member_parts(around, settings, client, held=self.held, on_held=self._keep)
        self.registrar = member.registrar
        self.drains = drains_of(
            *(around, settings, member),
            rounds=Rounds(self.mirror, self.membership),
            run_dir=self._files,
            notice_path=self.run_dir / layout.NOTICE_SOCKET,
        )
        self._tasks = [
            asyncio.create_task(client.watching.run()),
            asyncio.create_task(self.registrar.run()),
            asyncio.create_task(self.drains.run()),
        ]
        await self.soon(lambda: self.drains.notices.listening.is_set())

    def move(self, engine: MemoryEngine) -> None:
        """Let the store be another one from now on."""
        self.store.engine = engine
        self._tasks[0].cancel()
        self._tasks[0] = asyncio.create_task(self._client.watching.run())

    async def _keep(self, held: Held) -> None:
        self.held = held

    async def kill(self) -> None:
        """End the sidecar at once: no goodbye, nothing finished."""
        if not self._tasks:
            return
        await asyncio.to_thread(self._files.die)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    @property
    def defects(self) -> list[BaseException]:
        """What ended a task of the sidecar."""
        ended = [task for task in self._tasks if task.done() and not task.cancelled()]
        return [error for task in ended if (error := task.exception()) is not None]

    async def soon(self, holds: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
        """Wait until something holds that has no event to tell of it; ``holds`` may read files."""
        async with asyncio.timeout(patience_s):
            while not await asyncio.to_thread(holds):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def notice(self, source: str, left_s: float | None = None, reason: str = "test") -> Client:
        """Give notice, and listen."""
        return Client(self, {"notice": source, "reason": reason, "seconds_left": left_s})

    async def steps(self, what: str, number: int | None = None, local_rank: int = 0) -> list[int]:
        """The steps of one kind that a rank of round ``number`` (the present one) has logged."""
        return await asyncio.to_thread(self.logged, what, number, local_rank)

    def logged(self, what: str, number: int | None = None, local_rank: int = 0) -> list[int]:
        """As ``steps``; may block for as long as the disk does."""
        number = self.job.number if number is None else number
        return [
            step
            for kind, step in read_log(self.job.log(number, self.name, local_rank))
            if kind == what
        ]

    @property
    def drain(self) -> Drain | None:
        """Its drain, as the store has it."""
        return self.job.snapshot.drains.get(self.uid)

    def shown(self) -> object:
        """The phase of the gate that its ranks read; may block for as long as the disk does."""
        return json.loads((self.run_dir / "gate.json").read_bytes())["phase"]

    async def kept(self, name: str) -> Line | None:
        """A file of the run directory."""
        try:
            return cast(Line, json.loads(await asyncio.to_thread((self.run_dir / name).read_bytes)))
        except FileNotFoundError:
            return None

    def signal_ranks(self, number: signal.Signals) -> None:
        """Send its ranks a signal."""
        for rank in self.ranks:
            rank.send_signal(number)

    async def end_ranks(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Let the launcher's command end."""
        ranks, self.ranks = self.ranks, []
        for rank in ranks:
            if rank.returncode is None:
                rank.send_signal(number)
        for rank in ranks:
            await rank.wait()


class Client:
    """A client of the notice socket; one that is cut off asks again, as ``muster-run`` does."""

    def __init__(self, pod: Pod, fields: Line) -> None:
        self.told: list[Told] = []
        self._pod = pod
        self._given_s = pod.job.clock()
        self._fields = fields
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> Line:
        path = str(self._pod.run_dir / layout.NOTICE_SOCKET)
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(path)
            except OSError:
                await asyncio.sleep(0.02)
                continue
            try:
                writer.write(self._line())
                while (line := await reader.readline()).endswith(b"\n"):
                    self.told.append(Told(json.loads(line), *self._pod.job.acknowledged()))
                    if self.told[-1].line["phase"] in ("released", "cancelled", "refused"):
                        return self.told[-1].line
            except ConnectionError:
                pass
            finally:
                writer.close()

    def _line(self) -> bytes:
        left_s = self._fields["seconds_left"]
        if isinstance(left_s, float | int):
            left_s = max(0.0, left_s - (self._pod.job.clock() - self._given_s))
        return json.dumps({**self._fields, "seconds_left": left_s}).encode() + b"\n"

    @property
    def phases(self) -> list[object]:
        """The phases told so far."""
        return [told.line["phase"] for told in self.told]

    async def last(self, patience_s: float = PATIENCE_S) -> Line:
        """Wait for the last line."""
        async with asyncio.timeout(patience_s):
            return await self._task

    async def release(self) -> Line:
        """Wait for the last line, and end the command as ``muster-run`` does then."""
        line = await self.last()
        if line["phase"] == "released":
            await self._pod.end_ranks()
        return line

    def leave(self) -> None:
        """Go away."""
        self._task.cancel()


@dataclass(frozen=True, slots=True)
class Loop:
    """How ranks train: see ``drained_rank.py``."""

    step_s: float = 0.01
    save_s: float = 0.02
    steps: int = 100_000
    save_errors: int = 0
    save_errors_end_it: bool = False
    drains: bool = True
    steps_a_loop: int = 0
    evaluated: str = ""


@dataclass
class Job:
    """All of it. ``granted`` and ``done`` are what a watch of the store has shown of them.

    ``clock`` is that of all sidecars and of the store: what a busy machine takes uses up no grace.
    """

    engine: MemoryEngine
    clock: Callable[[], float]
    directory: Path
    least: int
    most: int
    grace_s: float
    below_min: Literal["hold", "commit"]
    pods: dict[str, Pod] = field(default_factory=dict)
    number: int = -1
    done: list[tuple[int, int]] = field(default_factory=list)
    ended_rounds: set[int] = field(default_factory=set)
    commits: list[Commit] = field(default_factory=list)
    drained: set[str] = field(default_factory=set)
    _wrongly_listed: set[str] = field(default_factory=set)
    _ranks_of: dict[int, list[tuple[str, int]]] = field(default_factory=dict)

    def follow(self) -> None:
        """Watch the store, as somebody who has no part in it."""
        store = self._store = MemoryStore(self.engine)
        client = self._client = JobClient.of(store, KEYS, clock=self.clock)
        self.mirror, self.membership = client.mirror, client.membership
        self.mirror.subscribe(self._see)
        self._watching = asyncio.create_task(client.watching.run())

    async def end(self) -> None:
        """End all of it."""
        for pod in self.pods.values():
            await pod.kill()
            await pod.end_ranks(signal.SIGKILL)
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)

    @property
    def snapshot(self) -> Snapshot:
        return self.membership.snapshot()

    @property
    def commit(self) -> Commit:
        return self.snapshot.commit or Commit()

    def phase_is(self, phase: str) -> Callable[[], bool]:
        return lambda: self.commit.phase == phase

    def acknowledged(self) -> tuple[dict[str, Vote], LastCommit | None]:
        """What the store itself says at this moment, whatever any watch has seen."""
        votes, last = {}, None
        for kv in self.engine.read(Interval.of(KEYS.prefix, prefix=True)):
            with suppress(RecordError):
                if kv.key.startswith(HERE.votes):
                    votes[kv.key.rpartition("/")[2]] = Vote.from_kv(kv)
                elif kv.key == KEYS.last_commit:
                    last = LastCommit.from_kv(kv)
        return votes, last

    def history(self) -> list[HistoryEntry]:
        """What is kept of drains."""
        entries = map(HistoryEntry.from_kv, self.mirror.under(KEYS.history))
        return [entry for entry in entries if entry.what == "drain"]

    async def put(self, *operations: Operation) -> None:
        """Write something, as whoever else might."""
        assert (await MemoryStore(self.engine).txn([], operations)).succeeded

    async def form(self, names: str, ranks: int = 1, loop: Loop = Loop(), **own: Loop) -> None:
        """Let these be the next world: a round on record, ranks that train in it."""
        for pod in self.pods.values():
            await pod.end_ranks(signal.SIGKILL)
        self.number += 1
        keys = HERE.run(RUN)
        frozen = tuple(Seat(name, "n", 1) for name in names)
        await self.put(Put(keys.round, Round(self.number, True, frozen=frozen).to_json()))
        self._ranks_of[self.number] = [(name, rank) for name in names for rank in range(ranks)]
        for at, (name, local_rank) in enumerate(self._ranks_of[self.number]):
            settings = own.get(name, loop)
            rank = await self._rank(self.pods[name], at, local_rank, ranks, settings)
            self.pods[name].ranks.append(rank)

    async def add(self, name: str) -> None:
        """Start another pod, and wait until it is a member."""
        pod = self.pods[name] = Pod(self, name, self.directory / name)
        await asyncio.to_thread(pod.deliver)
        await pod.start()
        await self.until(lambda: name in self.snapshot.members)

    async def lose_store(self) -> None:
        """Let the store be an empty one from now on. The launcher puts its round back."""
        former = self.mirror.kvs[HERE.run(RUN).round]
        self.engine = MemoryEngine(self.clock)
        await self.put(Put(former.key, former.value))
        self._watching.cancel()
        self._store.engine = self.engine
        self._watching = asyncio.create_task(self._client.watching.run())
        for pod in self.pods.values():
            pod.move(self.engine)

    async def ask(self, name: str) -> None:
        """Let a launcher wait for the next round."""
        node = Node(name, "asking", "n", 1, "127.0.0.1", 1, 0)
        await self.put(Put(HERE.run(RUN).node(name), node.to_json()))

    async def _rank(
        self, pod: Pod, rank: int, local_rank: int, local_size: int, loop: Loop
    ) -> asyncio.subprocess.Process:
        told = {
            "seed": f"{self.number}-{rank}",
            "log": str(self.log(self.number, pod.name, local_rank)),
            **{name: getattr(loop, name) for name in Loop.__slots__},
        }
        environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "MUSTER_RUN_DIR": str(pod.run_dir),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(FIRST_PORT + self.number),
            "TORCHELASTIC_RUN_ID": RUN,
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(len(self._ranks_of[self.number])),
            "LOCAL_WORLD_SIZE": str(local_size),
        }
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *(
                "-S",
                str(ROOT / "tests/support/scripts/drained_rank.py"),
                json.dumps(told),
            ),
            env=environ,
            stderr=None if loop.save_errors == 0 else asyncio.subprocess.DEVNULL,
        )

    def log(self, number: int, name: str, local_rank: int) -> Path:
        return self.directory / f"{number}-{name}-{local_rank}.log"

    async def training(self, steps: int = 3) -> None:
        """Wait until every rank of the present round has come so far."""
        for name, local_rank in self._ranks_of[self.number]:
            pod = self.pods[name]

            def steps_of(pod: Pod = pod, local_rank: int = local_rank) -> bool:
                return len(pod.logged("step", local_rank=local_rank)) >= steps

            await pod.soon(steps_of)

    async def goes_on(self) -> None:
        """Wait until every rank of the present round has come further than it is now."""
        counts = [len(await self.pods[n].steps("step", None, r)) for n, r in self._ranks()]
        await self.training(max(counts) + 3)

    async def until(self, holds: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        """Wait until the watched store is as wished."""
        try:
            async with asyncio.timeout(patience_s):
                while not holds():
                    await self.mirror.changed_after(self.mirror.sequence)
        except TimeoutError:
            raise AssertionError(
                f"the store stays at {self.commit} {self.snapshot.drains}"
            ) from None

    def _ranks(self) -> list[tuple[str, int]]:
        return self._ranks_of[self.number]

    # -- what must hold whatever happens

    def _see(self, events: Sequence[WatchEvent]) -> None:
        snapshot = self.membership.snapshot()
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
            for member in decide(snapshot).listed
            if member.pod_uid in snapshot.drains
        }

    def check(self) -> None:
        """Raise where an invariant was broken, or a sidecar met a defect."""
        assert self._wrongly_listed == set()
        for pod in self.pods.values():
            assert pod.defects == []
        for number, step in self.done:
            for name, local_rank in self._ranks_of[number]:
                saved = self.pods[name].logged("save", number, local_rank)
                assert step in saved, f"{name}/{local_rank} saved {saved}, and {step} is done"
        for number in self.ended_rounds:
            step = max(step for at, step in self.done if at == number)
            for name, local_rank in self._ranks_of[number]:
                trained = max(self.pods[name].logged("step", number, local_rank))
                assert trained == step, f"{name}/{local_rank} trained {trained}, beyond {step}"


def read_log(path: Path) -> list[tuple[str, int]]:
    """Read what a rank logged; empty before its first line."""
    try:
        with open(path) as file:
            lines = [line.split() for line in file]
    except FileNotFoundError:
        return []
    return [(kind, int(step)) for kind, step in lines]


@asynccontextmanager
async def job(
    names: str = "abc",
    least: int = 1,
    most: int = 8,
    grace_s: float = 30.0,
    below_min: Literal["hold", "commit"] = "hold",
) -> AsyncIterator[Job]:
    """Start a sidecar for each name."""
    directory = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="drain"))
    async with awake_clock() as clock:
        one = Job(MemoryEngine(clock), clock, directory, least, most, grace_s, below_min)
        one.follow()
        try:
            for name in names:
                await one.add(name)
            yield one
            await asyncio.to_thread(one.check)
        finally:
            await one.end()
            await asyncio.to_thread(shutil.rmtree, directory)
