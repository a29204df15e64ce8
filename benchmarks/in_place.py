# SPDX-License-Identifier: Apache-2.0
"""``in_place``: a world changes around its ranks, which live on.

A job of three pods under a real torchrun each: rank 0's pod is drained, another joins, the node of
rank 0 is killed, another joins, a worker is killed and comes back. Then two pods of four ranks, and
two with a state of 1 GB. The baselines, in turns: the same by a save and a restart, and torch's own
c10d. All times hold one step of 50 ms.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from time import monotonic

from benchmarks import drain, recover
from benchmarks.etcd_members import etcd_server
from benchmarks.figures import Bar, Figure, of_runs, percentile, say
from benchmarks.in_place_job import Job, Times
from rdzv.job import JobClient
from rdzv.keys import JobKeys
from rdzv.store.etcd.client import EtcdStore

TURNS = 2
CYCLES = 6
"""Cycles of a job: each has five planned changes and two losses."""

STATE_BYTES = 1_000_000_000
COPIES = 3


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
        with subprocess.Popen(
            [sys.executable, "-c", receiver], cwd=Path(__file__).parents[1]
        ) as other:
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
            say(f"in place: {found[-1]}")
            today = await drain.row_of_drains(root / f"today-{turn}", endpoint)
            today_planned += [one.total_s for one in today]
            _, lost_s = await recover.kills(root / f"kills-{turn}", endpoint)
            today_losses.append(lost_s)
            native.append(await drain.native_sigterm(root / f"native-{turn}"))
            say(
                f"by a restart: drains {today_planned}, losses {today_losses};"
                f" native SIGTERM {native}"
            )
        crowd = await eight_ranks(root / "eight", endpoint, cycles // 2)
        say(f"two pods of four ranks: {crowd}")
        joins, plain = await handed_over(root / "state", endpoint, COPIES)
        say(f"1 GB: joins {joins}, copies {plain}")
    return [
        *figures(found, today_planned, today_losses, native),
        _planned("in_place/planned change of 8 ranks on two pods", [*crowd.drains, *crowd.joins]),
        of_runs(
            "in_place/a join that hands 1 GB over, beside a copy over loopback",
            "s",
            Bar("ratio", "<=", 1.5),
            joins,
            plain,
            "the copy",
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
        of_runs(
            "in_place/loss to the next step, beyond its detection",
            "s",
            Bar("value", "<=", 0.5),
            beyond,
        ),
        of_runs(
            "in_place/rank 0's node killed to the next step",
            "s",
            None,
            nodes,
            today_losses,
            "a save and a restart",
        ),
        of_runs(
            "in_place/survivors that were started again",
            "1",
            Bar("value", "==", 0),
            [one.restarted for one in found],
            by=sum,
        ),
    ]


def _planned(name: str, runs: list[float], today: Sequence[float] = ()) -> Figure:
    bar = Bar("value", "<=", 0.5)
    return of_runs(name, "s", bar, runs, list(today), "a save and a restart" if today else "")
