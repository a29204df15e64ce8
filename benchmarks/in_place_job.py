# SPDX-License-Identifier: Apache-2.0
"""A job of simulated pods whose worlds change in place, and what each change took its ranks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from time import monotonic

from benchmarks.node_processes import Node, Step, first_of
from rdzv.keys import JobKeys
from rdzv.store import WatchEvent

SCRIPT = Path(__file__).parent / "training_in_place.py"
SIZE = (1, 4)
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
        node = self._node()
        await node.start()
        self.nodes.append(node)
        await self.until_steps()

    async def start(self, pods: int) -> None:
        """Start the first pods."""
        await asyncio.to_thread(self._directory.mkdir)
        self.nodes = [self._node() for _ in range(pods)]
        await asyncio.gather(*(node.start() for node in self.nodes))
        await self.until_steps()

    def _node(self) -> Node:
        self._count += 1
        return Node(
            self._directory,
            f"node-{self._count}",
            self._endpoint,
            SIZE,
            f"--nproc-per-node={self._slots}",
            environment=self._environment,
            script=SCRIPT,
        )

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
        return first_of(self.nodes)

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

        took_s, seen_s = await self._after(kill, victim, breaks=True)
        self.times.nodes.append(took_s)
        self.times.seen_nodes.append(seen_s)
        await victim.kill()

    async def loses_worker(self, victim: Node) -> None:
        """Kill a worker, and wait until its torchrun has started another, which has joined."""
        self.nodes.remove(victim)
        pid = max(victim.made())
        took_s, seen_s = await self._after(
            lambda: os.kill(pid, signal.SIGKILL), victim, breaks=True
        )
        self.times.workers.append(took_s)
        self.times.seen_workers.append(seen_s)
        before = {pid: steps[-1] for node in self.nodes for pid, steps in node.made().items()}
        self.nodes.append(victim)
        await self.until_steps()
        self.times.joins.append(max(_gap(steps) for steps in self._made(before)))

    async def _after(
        self, strike: Callable[[], None], victim: Node, *, breaks: bool = False
    ) -> tuple[float, float]:
        """Return how long the survivors' next step took, and the record of the loss."""
        before = {pid: steps[-1] for node in self.nodes for pid, steps in node.made().items()}
        size = self._slots * len(self.nodes)
        self._losses.clear()
        began_s = monotonic()
        strike()
        await self.until_steps()
        firsts = [
            next(one.at_s for one in steps if one.size == size and one.at_s > began_s)
            for steps in self._made(before, breaks=breaks)
        ]
        seen_s = self._losses.get(victim.name, began_s)
        return max(firsts) - began_s, seen_s - began_s

    def _made(self, before: dict[int, Step], *, breaks: bool = False) -> list[list[Step]]:
        """Return what the survivors have made since; raise if they have lost or repeated a step.

        ``breaks``: a step may be broken off on some ranks and whole on others, which then give its
        state to all.
        """
        now = {pid: steps for node in self.nodes for pid, steps in node.made().items()}
        self.times.restarted += len(before.keys() - now.keys())
        found = [
            [one for one in now.get(pid, []) if one.number >= last.number]
            for pid, last in before.items()
        ]
        made = {one.number for steps in found for one in steps}
        for one, after in chain.from_iterable(map(pairwise, found)):
            skipped = set(range(one.number + 1, after.number))
            if after.number <= one.number or not skipped <= (made if breaks else set()):
                raise RuntimeError(f"a rank has lost or repeated a step: {one}, then {after}")
        return found

    async def end(self) -> None:
        """Kill what is left."""
        await asyncio.gather(*(node.kill() for node in self.nodes))


def _gap(steps: Sequence[Step]) -> float:
    return max(
        (after.at_s - one.at_s for one, after in pairwise(steps) if after.size != one.size),
        default=0.0,
    )
