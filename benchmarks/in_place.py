# SPDX-License-Identifier: Apache-2.0
"""``in_place``: a world changes around its ranks, which live on.

A job of three pods under a real torchrun each: rank 0's pod is drained, another joins, the node of
rank 0 is killed, another joins, a worker is killed and comes back. Then two pods of four ranks, and
two with a state of 1 GB. The baselines, in turns: the same by a save and a restart, and torch's own
c10d. All times hold one step of 50 ms.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import monotonic

from benchmarks import drain, recover
from benchmarks.etcd_server import etcd_server
from benchmarks.figures import Bar, Figure, of_medians, percentile
from benchmarks.node_processes import Sidecar, Step, Torchrun
from rdzv.job import JobClient
from rdzv.keys import JobKeys
from rdzv.store import WatchEvent
from rdzv.store.etcd.client import EtcdStore

TURNS = 2
CYCLES = 6
"""Cycles of a job: each has five planned changes and two losses."""

SCRIPT = Path(__file__).parent / "training_in_place.py"
SIZE = (1, 4)
STATE_BYTES = 1_000_000_000
COPIES = 3
DEADLINE_S = 120.0
STEPS = 10
"""Steps that a world makes before something else happens to it."""


@dataclass(slots=True)
class Times:
    """The changes of all jobs, in seconds.

    ``joins``: the longest time without a step on a survivor. ``drains``, ``nodes``, ``workers``:
    from the signal until all survivors have made a step without it. ``seen_nodes`` and
    ``seen_workers``: from the signal until the store shows the loss. ``restarted``: survivors'
    processes that have ended.
    """

    joins: list[float] = field(default_factory=list)
    drains: list[float] = field(default_factory=list)
    nodes: list[float] = field(default_factory=list)
    seen_nodes: list[float] = field(default_factory=list)
    workers: list[float] = field(default_factory=list)
    seen_workers: list[float] = field(default_factory=list)
    restarted: int = 0


class Node:
    """One simulated pod: a sidecar, and a torchrun under ``muster-run``."""

    def __init__(
        self, directory: Path, name: str, endpoint: str, slots: int, environment: dict[str, str]
    ) -> None:
        self.name = name
        self._directory = directory
        self._slots = slots
        self._environment = environment
        job = directory.name
        self.sidecar = Sidecar(directory / name, job, name, endpoint, SIZE, wrapped=True)
        self.torchrun: Torchrun

    async def start(self) -> None:
        """Start the sidecar, then the container."""
        await self.sidecar.start()
        await self.sidecar.ready()
        self.torchrun = Torchrun(
            self._directory / f"{self.name}.torchrun",
            {**self.sidecar.torch_environment(), **self._environment},
            f"--nproc-per-node={self._slots}",
            "--max-restarts=99",
            wrapper=self.sidecar.wrapper,
            script=SCRIPT,
        )
        await self.torchrun.start()

    async def kill(self) -> None:
        """Kill all of it with SIGKILL; the sidecar first, as a dead node announces nothing."""
        await self.sidecar.kill()
        await self.torchrun.kill()

    def made(self) -> dict[int, list[Step]]:
        """Return the steps of its living workers."""
        steps = self.torchrun.steps
        return {pid: steps.of(pid) for pid in self.torchrun.workers() & steps.pids}


class Job:
    """One job of pods that come and go."""

    def __init__(self, directory: Path, endpoint: str, slots: int, state_bytes: int) -> None:
        self.nodes: list[Node] = []
        self.times = Times()
        self._directory = directory
        self._endpoint = endpoint
        self._slots = slots
        self._environment = {"BENCH_STATE_BYTES": str(state_bytes)}
        self._keys = JobKeys("bench", directory.name).in_generation(1).run(directory.name)
        self._losses: dict[str, float] = {}
        self._count = 0

    async def add(self) -> None:
        """Start one more pod, and wait until it trains."""
        name = f"node-{self._count}"
        self._count += 1
        node = Node(self._directory, name, self._endpoint, self._slots, self._environment)
        await node.start()
        self.nodes.append(node)
        await self.until_steps()

    async def start(self, pods: int) -> None:
        """Start the first pods."""
        await asyncio.to_thread(self._directory.mkdir)
        for _ in range(pods):
            name = f"node-{self._count}"
            self._count += 1
            self.nodes.append(
                Node(self._directory, name, self._endpoint, self._slots, self._environment)
            )
        await asyncio.gather(*(node.start() for node in self.nodes))
        await self.until_steps()

    def note(self, events: Sequence[WatchEvent]) -> None:
        """Note when the store first shows that a node is not what it was."""
        for event in events:
            if event.kv.key.startswith(self._keys.nodes):
                name = event.kv.key.removeprefix(self._keys.nodes)
                self._losses.setdefault(name, monotonic())

    async def until_steps(self) -> None:
        """Wait until all ranks have made ``STEPS`` steps in one world of all pods."""
        size = self._slots * len(self.nodes)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                await asyncio.sleep(0.1)
                made = [steps for node in self.nodes for steps in node.made().values()]
                if len(made) == size and all(
                    len(steps) >= STEPS and all(one.size == size for one in steps[-STEPS:])
                    for steps in made
                ):
                    return

    @property
    def first(self) -> Node:
        """The pod of rank 0."""
        for node in self.nodes:
            if any(steps[-1].rank == 0 for steps in node.made().values()):
                return node
        raise RuntimeError("no node has rank 0")

    async def joins(self) -> None:
        """Let a pod join."""
        before = {pid: steps[-1] for node in self.nodes for pid, steps in node.made().items()}
        await self.add()
        found = self._made(before)
        self.times.joins.append(max(_gap(steps) for steps in found))

    async def drains(self, victim: Node) -> None:
        """Drain a pod."""
        self.nodes.remove(victim)
        process = victim.torchrun.process
        assert process is not None
        took_s, _ = await self._after(lambda: process.send_signal(signal.SIGTERM), victim)
        self.times.drains.append(took_s)
        if await process.wait() != 128 + signal.SIGTERM:
            raise RuntimeError(f"a drained container ended with {process.returncode}")
        await victim.kill()

    async def loses(self, victim: Node) -> None:
        """Kill all that runs on a node."""
        self.nodes.remove(victim)
        pids = [victim.sidecar.pid, *victim.torchrun.workers()]
        assert victim.torchrun.process is not None
        pids.append(victim.torchrun.process.pid)

        def kill() -> None:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        took_s, seen_s = await self._after(kill, victim)
        self.times.nodes.append(took_s)
        self.times.seen_nodes.append(seen_s)
        await victim.kill()

    async def loses_worker(self, victim: Node) -> None:
        """Kill a worker, and wait until its torchrun has started another, which has joined."""
        self.nodes.remove(victim)
        pid = max(victim.made())
        took_s, seen_s = await self._after(lambda: os.kill(pid, signal.SIGKILL), victim)
        self.times.workers.append(took_s)
        self.times.seen_workers.append(seen_s)
        before = {pid: steps[-1] for node in self.nodes for pid, steps in node.made().items()}
        self.nodes.append(victim)
        await self.until_steps()
        self.times.joins.append(max(_gap(steps) for steps in self._made(before)))

    async def _after(self, strike: Callable[[], None], victim: Node) -> tuple[float, float]:
        """Return how long the survivors' next step took, and the record of the loss."""
        before = {pid: steps[-1] for node in self.nodes for pid, steps in node.made().items()}
        size = self._slots * len(self.nodes)
        self._losses.clear()
        began_s = monotonic()
        strike()
        await self.until_steps()
        firsts = [
            next(one.at_s for one in steps if one.size == size and one.at_s > began_s)
            for steps in self._made(before)
        ]
        seen_s = self._losses.get(victim.name, began_s)
        return max(firsts) - began_s, seen_s - began_s

    def _made(self, before: dict[int, Step]) -> list[list[Step]]:
        """Return what the survivors have made since; raise if one has lost or repeated a step."""
        now = {pid: steps for node in self.nodes for pid, steps in node.made().items()}
        self.times.restarted += len(before.keys() - now.keys())
        found = []
        for pid, last in before.items():
            steps = [one for one in now.get(pid, []) if one.number >= last.number]
            if any(after.number != one.number + 1 for one, after in pairwise(steps)):
                raise RuntimeError(f"a rank has lost or repeated a step after {last.number}")
            found.append(steps)
        return found

    async def end(self) -> None:
        """Kill what is left."""
        await asyncio.gather(*(node.kill() for node in self.nodes))


def _gap(steps: Sequence[Step]) -> float:
    return max(
        (after.at_s - one.at_s for one, after in pairwise(steps) if after.size != one.size),
        default=0.0,
    )


@asynccontextmanager
async def running(
    directory: Path, endpoint: str, *, pods: int, slots: int = 1, state_bytes: int = 0
) -> AsyncIterator[Job]:
    """Run a job until the end of the block."""
    job = Job(directory, endpoint, slots, state_bytes)
    store = EtcdStore([endpoint])
    keys = JobKeys("bench", directory.name)
    try:
        async with JobClient.of(store, keys, clock=monotonic).following() as client:
            unsubscribe = client.mirror.subscribe(job.note)
            await job.start(pods)
            yield job
            unsubscribe()
    finally:
        await job.end()
        await store.close()


async def changes(directory: Path, endpoint: str, cycles: int) -> Times:
    """Change the world of a job of three pods, each way in turn."""
    async with running(directory, endpoint, pods=3) as job:
        for _ in range(cycles):
            await job.drains(job.first)
            await job.joins()
            await job.loses(job.first)
            await job.joins()
            await job.loses_worker(job.nodes[-1])
        return job.times


async def eight_ranks(directory: Path, endpoint: str, cycles: int) -> Times:
    """Let one of two pods of four ranks leave, and another join."""
    async with running(directory, endpoint, pods=2, slots=4) as job:
        for _ in range(cycles):
            await job.drains(job.first)
            await job.joins()
        return job.times


async def handed_over(directory: Path, endpoint: str, copies: int) -> tuple[list[float], ...]:
    """Measure joins with a state of 1 GB, and copies of as much over loopback, in turns."""
    joins, plain = [], []
    async with running(directory, endpoint, pods=1, state_bytes=STATE_BYTES) as job:
        for _ in range(copies):
            plain.append(await asyncio.to_thread(loopback_copy, STATE_BYTES))
            await job.joins()
            await job.drains(job.nodes[-1])
        joins = job.times.joins
    return joins, plain


def loopback_copy(size: int) -> float:
    """Measure the copy of ``size`` bytes from one process to another by a socket of loopback."""
    sent = bytearray(b"x") * size
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        receiver = f"from benchmarks.in_place import receive; receive({port}, {size})"
        with subprocess.Popen([sys.executable, "-c", receiver], cwd=SCRIPT.parent.parent) as other:
            connection, _ = server.accept()
            with connection:
                connection.recv(1)
                began_s = monotonic()
                connection.sendall(sent)
                connection.recv(1)
                took_s = monotonic() - began_s
            other.wait()
    return took_s


def receive(port: int, size: int) -> None:
    """Take ``size`` bytes from a port of loopback into memory that is there already."""
    into = memoryview(bytearray(b"y") * size)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"r")
        while len(into):
            into = into[connection.recv_into(into) :]
        connection.sendall(b"d")


async def measure(turns: int = TURNS, cycles: int = CYCLES) -> list[Figure]:
    """Measure changes in place and their baselines in turns, then more ranks, and more state."""
    found: list[Times] = []
    today_planned: list[float] = []
    today_losses: list[float] = []
    native: list[float] = []
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(etcd_server())
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
        for turn in range(turns):
            found.append(await changes(root / f"job-{turn}", endpoint, cycles))
            _say(f"in place: {found[-1]}")
            today = await drain.row_of_drains(root / f"today-{turn}", endpoint)
            today_planned += [one.total_s for one in today]
            _, lost_s = await recover.kills(root / f"kills-{turn}", endpoint)
            today_losses.append(lost_s)
            native.append(await drain.native_sigterm(root / f"native-{turn}"))
            _say(
                f"by a restart: drains {today_planned}, losses {today_losses};"
                f" native SIGTERM {native}"
            )
        crowd = await eight_ranks(root / "eight", endpoint, cycles // 2)
        _say(f"two pods of four ranks: {crowd}")
        joins, plain = await handed_over(root / "state", endpoint, COPIES)
        _say(f"1 GB: joins {joins}, copies {plain}")
    return [
        *figures(found, today_planned, today_losses, native),
        _planned("in_place/planned change of 8 ranks on two pods", [*crowd.drains, *crowd.joins]),
        Figure(
            "in_place/a join that hands 1 GB over, beside a copy over loopback",
            median(joins),
            "s",
            Bar("ratio", "<=", 1.5),
            tuple(joins),
            median(plain),
            "the copy",
            tuple(plain),
        ),
    ]


def figures(
    found: Sequence[Times],
    today_planned: list[float],
    today_losses: list[float],
    native: list[float],
) -> list[Figure]:
    """Build the figures of changes in place, beside a save and a restart."""
    planned = [took for one in found for took in (*one.drains, *one.joins)]
    nodes = [took for one in found for took in one.nodes]
    beyond = [
        took - seen
        for one in found
        for took, seen in zip(
            (*one.nodes, *one.workers), (*one.seen_nodes, *one.seen_workers), strict=True
        )
    ]
    return [
        _planned("in_place/planned change to the next step", planned, today_planned),
        Figure(
            "in_place/planned change to the next step, p99",
            percentile(planned, 0.99),
            "s",
            Bar("value", "<=", 1.0),
            tuple(planned),
            median(native) if native else None,
            "native c10d, median",
            tuple(native),
        ),
        Figure(
            "in_place/loss to the next step, beyond its detection",
            median(beyond),
            "s",
            Bar("value", "<=", 0.5),
            tuple(beyond),
        ),
        of_medians(
            "in_place/rank 0's node killed to the next step",
            "s",
            None,
            nodes,
            today_losses,
            "a save and a restart",
        ),
        Figure(
            "in_place/survivors that were started again",
            float(sum(one.restarted for one in found)),
            "1",
            Bar("value", "==", 0),
            tuple(float(one.restarted) for one in found),
        ),
    ]


def _planned(name: str, runs: list[float], today: Sequence[float] = ()) -> Figure:
    bar = Bar("value", "<=", 0.5)
    return of_medians(name, "s", bar, runs, list(today), "a save and a restart" if today else "")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
