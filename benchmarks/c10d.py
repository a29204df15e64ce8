# SPDX-License-Identifier: Apache-2.0
"""``c10d``: a real sidecar's endpoint beside torch's own server, and beside raw etcd transactions.

If the load generator saturates the server's core, reads are compared by operations per second of
the server's processor time, which is robust against other work on the machine. A single operation
in flight saturates no server: there they are compared by operations per second. The share of a core
that each server had goes to stderr. Writes reach etcd, so they are compared by latency with one
transaction on the same etcd over the same hop, by a helper process: of the better of the packages
etcd3 and aetcd, and, without a bar, of the sidecar's own driver.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.etcd_members import etcd_server
from benchmarks.figures import Bar, Figure, of_runs, say
from benchmarks.node_processes import Sidecar
from benchmarks.processor_time import cpu_s
from benchmarks.worker import worker

SOURCE = Path(__file__).with_name("c10d_load.c")
ROUNDS = 7
SECONDS = 0.5
VALUE_BYTES = 64
READS = ("get", "wait_get", "check")
WRITES = ("set", "cas", "add")
LOADS = ((1, 1), (1, 16), (64, 1))
"""Connections, and operations in flight on each. torch's client has one; a single connection with
one operation leaves the server idle, so there is also one with sixteen."""
READ_BAR = Bar("ratio", ">=", 0.7)
BUSY_READ_BAR = Bar("ratio", ">=", 0.95)
"""For 64 connections: the load on a server when a job forms its world."""
WRITE_BAR = Bar("ratio", "<=", 1.0)
OWN = "http2"
PUBLIC = ("the etcd3 package", "aetcd")
"""Clients whose transaction a write is compared with, over the same hop."""


@dataclass(frozen=True, slots=True)
class Server:
    """One of the servers under load: its address and its process."""

    name: str
    port: int
    pid: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the load generator. ``per_cpu_s``: operations per second of server CPU."""

    per_s: float
    per_cpu_s: float
    busy: float
    p50_us: float
    p99_us: float


async def measure(rounds: int = ROUNDS, seconds: float = SECONDS) -> list[Figure]:
    """Load both servers in turns."""
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        generator = await asyncio.to_thread(_compile, Path(name))
        async with (
            etcd_server() as endpoint,
            _native() as native,
            _hops(endpoint) as hops,
            _sidecar(Path(name), endpoint) as ours,
        ):
            load = Load(generator, rounds, seconds)
            reads = [
                await load.read(operation, connections, depth, ours, native)
                for operation in READS
                for connections, depth in LOADS
            ]
            writes = [await load.write(operation, ours, hops) for operation in WRITES]
    return reads + [figure for figures in writes for figure in figures]


class Load:
    """The load generator, with the number and the duration of its runs."""

    def __init__(self, generator: Path, rounds: int, seconds: float) -> None:
        self._generator = generator
        self._rounds = rounds
        self._seconds = seconds

    async def read(
        self, operation: str, connections: int, depth: int, ours: Server, native: Server
    ) -> Figure:
        """Run one load on both servers in turns."""
        runs: dict[str, list[Run]] = {ours.name: [], native.name: []}
        for _ in range(self._rounds):
            for server in (native, ours):
                runs[server.name].append(await self._run(server, operation, connections, depth))
        label = f"c10d/{operation}/{connections}" + (f"x{depth}" if depth > 1 else "")
        for name, those in runs.items():
            busy = median(run.busy for run in those)
            p50, p99 = median(run.p50_us for run in those), median(run.p99_us for run in those)
            say(f"{label}, {name}: core {busy:.0%} busy, p50 {p50:.0f} µs, p99 {p99:.0f} µs")
        fills_core = connections * depth > 1
        served = {
            name: [run.per_cpu_s if fills_core else run.per_s for run in those]
            for name, those in runs.items()
        }
        return of_runs(
            label,
            "operations per second of server CPU" if fills_core else "operations per second",
            BUSY_READ_BAR if connections > 1 else READ_BAR,
            served[ours.name],
            served[native.name],
            "torch's own server",
        )

    async def write(self, operation: str, ours: Server, hops: Sequence[Server]) -> list[Figure]:
        """Write through the sidecar and through each hop in turns, one at a time."""
        latencies: list[float] = []
        over: dict[str, list[float]] = {hop.name: [] for hop in hops}
        for _ in range(self._rounds):
            for hop in hops:
                over[hop.name].append((await self._run(hop, "set", 1, 1)).p50_us)
            latencies.append((await self._run(ours, operation, 1, 1)).p50_us)
        name, best = f"c10d/{operation} latency", min(PUBLIC, key=lambda one: median(over[one]))
        return [
            of_runs(f"{name}{who}", "µs", bar, latencies, over[other], f"a transaction of {other}")
            for who, bar, other in (("", WRITE_BAR, best), (f", by {OWN}", None, OWN))
        ]

    async def _run(self, server: Server, operation: str, connections: int, depth: int) -> Run:
        arguments = (server.port, operation, connections, depth, VALUE_BYTES, self._seconds)
        before_s = cpu_s(server.pid)
        process = await asyncio.create_subprocess_exec(
            self._generator, *map(str, arguments), stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        used_s = cpu_s(server.pid) - before_s
        if process.returncode:
            raise RuntimeError(f"the load generator failed on {server.name}: {operation}")
        result = json.loads(output)
        return Run(
            per_s=result["operations"] / result["seconds"],
            per_cpu_s=result["operations"] / used_s,
            busy=used_s / result["seconds"],
            p50_us=result["p50_us"],
            p99_us=result["p99_us"],
        )


def _compile(directory: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        raise SystemExit("No C compiler was found: install one that is called as cc.")
    generator = directory / "c10d_load"
    subprocess.run([compiler, "-O2", "-o", generator, SOURCE], check=True)
    return generator


@asynccontextmanager
async def _native() -> AsyncIterator[Server]:
    async with worker("benchmarks.join_handlers") as process:
        where = await process.ask("host")
        if not where["libuv"]:
            raise RuntimeError("torch's server does not run on libuv here")
        yield Server("torch", where["port"], where["pid"])


@asynccontextmanager
async def _hops(endpoint: str) -> AsyncIterator[list[Server]]:
    async with AsyncExitStack() as stack:
        hops = []
        for name in (OWN, *PUBLIC):
            process = await stack.enter_async_context(worker("benchmarks.c10d_hop"))
            where = await process.ask("serve", name=name, endpoint=endpoint)
            hops.append(Server(name, where["port"], where["pid"]))
        yield hops


@asynccontextmanager
async def _sidecar(directory: Path, endpoint: str) -> AsyncIterator[Server]:
    sidecar = Sidecar(directory / "node-0", "c10d", "node-0", endpoint, (1, 1))
    await sidecar.start()
    try:
        await sidecar.ready()
        assert sidecar.process is not None
        port = int(sidecar.torch_environment()["PET_RDZV_ENDPOINT"].rpartition(":")[2])
        yield Server("muster", port, sidecar.process.pid)
    finally:
        await sidecar.kill()
