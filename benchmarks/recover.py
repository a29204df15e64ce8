# SPDX-License-Identifier: Apache-2.0
"""``recover``: rank 0 is killed with SIGKILL under a real torchrun job of three nodes.

The time is from the kill until every survivor has made a step in the new world, minus the time in
which a bare torchrun in the same run restarts its workers after one of them crashed: imports and
process group, which no rendezvous can save.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.etcd_members import etcd_server
from benchmarks.figures import Bar, Figure, of_runs, say
from benchmarks.node_processes import Node, first_of
from benchmarks.worlds import bare_restart, start_native, torchruns, until_world

ROUNDS = 3
NODES = 3
SIZE = (2, 3)
LEASE_TTL_S = 10.0
"""The sidecar's default."""

DEAD_WITHIN_S = 30.0


async def measure(rounds: int = ROUNDS) -> list[Figure]:
    """Restart, kill the agent, kill the node, and kill native torchrun's agent, in turns."""
    bare: list[float] = []
    agent: list[float] = []
    node: list[float] = []
    native_died: list[bool] = []
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(etcd_server())
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
        for turn in range(rounds):
            bare.append(await bare_restart(root / f"bare-{turn}"))
            say(f"bare restart of 2 workers: {bare[-1]:.2f} s")
            killed_agent_s, killed_node_s = await kills(root / f"job-{turn}", endpoint)
            agent.append(killed_agent_s)
            node.append(killed_node_s)
            say(f"rank 0's agent killed: {agent[-1]:.2f} s, its node: {node[-1]:.2f} s")
            native_died.append(await _native_dies(root / f"native-{turn}"))
            say(f"native c10d, rank 0's agent killed: job dead: {native_died[-1]}")
    return [
        _figure("recover/rank 0's agent killed", agent, bare, 3.0),
        _figure("recover/rank 0's node killed", node, bare, LEASE_TTL_S + 5.0),
        # If a job of ours did not go on, the benchmark has failed before.
        of_runs(
            "recover/jobs that go on",
            "1",
            Bar("value", "==", 1),
            [1.0] * rounds,
            [float(not died) for died in native_died],
            "native c10d",
        ),
    ]


def _figure(name: str, runs: list[float], bare: list[float], limit_s: float) -> Figure:
    """Build the figure of the median time of the runs beyond the bare restart of their round."""
    beyond = [run - restart for run, restart in zip(runs, bare, strict=True)]
    return of_runs(
        f"{name}, beyond a bare restart",
        "s",
        Bar("value", "<=", limit_s),
        beyond,
        bare,
        "bare restart",
    )


async def kills(directory: Path, endpoint: str) -> tuple[float, float]:
    """Kill rank 0's agent with its workers; let it come back; kill its whole node."""
    nodes = [Node(directory, f"node-{n}", endpoint, SIZE, wrapped=False) for n in range(NODES)]
    try:
        await asyncio.gather(*(node.start() for node in nodes))
        await until_world([node.torchrun for node in nodes], size=NODES)
        first = first_of(nodes)
        agent_s = await _recovery(nodes, first, first.torchrun.kill)
        await first.launch()
        await until_world([node.torchrun for node in nodes], size=NODES)
        first = first_of(nodes)
        return agent_s, await _recovery(nodes, first, first.kill)
    finally:
        await asyncio.gather(*(node.kill() for node in nodes))


async def _recovery(
    nodes: Sequence[Node], victim: Node, kill: Callable[[], Awaitable[None]]
) -> float:
    survivors = [node.torchrun for node in nodes if node is not victim]
    before = set().union(*(torchrun.steps.pids for torchrun in survivors))
    killed_s = time.monotonic()
    await kill()
    return await until_world(survivors, size=NODES - 1, without=before) - killed_s


async def _native_dies(directory: Path) -> bool:
    """Kill rank 0's agent and worker under torch's own c10d; return whether all agents end."""
    async with torchruns() as running:
        await start_native(directory, running, NODES, SIZE)
        await until_world(running, size=NODES)
        await running[0].kill()
        deadline_s = time.monotonic() + DEAD_WITHIN_S
        while time.monotonic() < deadline_s:
            if all(torchrun.ended for torchrun in running):
                return True
            await asyncio.sleep(0.1)
        return False
