# SPDX-License-Identifier: Apache-2.0
"""``horovod``: a host leaves a real horovodrun's job, and another one joins it.

A leave is measured from the SIGTERM to the host's container until its worker has ended and all
others have made their next step; a join until all have made a step with the newcomer. The baseline,
in turns, is the same job with a plain file, printed by ``cat``, and OpenSSH to start its workers:
its times are horovodrun's poll each second, the newcomer's imports, and the reset.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.etcd_members import etcd_server
from benchmarks.figures import Bar, Figure, of_runs, p99, say
from benchmarks.horovod_job import HorovodJob
from benchmarks.horovod_jobs import MusterJob, SshJob
from benchmarks.openssh import sshd
from tests.support.horovod.cluster import horovod_folder

ROUNDS = 5
CYCLES = 6
"""Leaves and joins per job."""

NODES = 3
SETTLED_S = 1.0
"""Time for which a world makes steps before the next change."""


@dataclass(frozen=True, slots=True)
class Runs:
    """The seconds of the leaves and joins of one kind of job."""

    left: list[float] = field(default_factory=list)
    joined: list[float] = field(default_factory=list)


async def measure(rounds: int = ROUNDS) -> list[Figure]:
    """Take pairs of jobs through their changes."""
    muster, ssh = Runs(), Runs()
    async with AsyncExitStack() as stack:
        # For horovodrun, and for the workers' python.
        folder = await asyncio.to_thread(horovod_folder)
        os.environ["PATH"] = os.pathsep.join((folder, os.environ["PATH"]))
        endpoint = await stack.enter_async_context(etcd_server())
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
        client = await stack.enter_async_context(sshd(root / "ssh"))
        for turn in range(rounds):
            pair = (
                (SshJob(root / f"ssh-{turn}", endpoint, NODES, client), ssh),
                (MusterJob(root / f"muster-{turn}", endpoint, NODES), muster),
            )
            await change(pair)
    return figures(muster, ssh)


async def change(pair: Sequence[tuple[HorovodJob, Runs]]) -> None:
    """Take two jobs through their leaves and joins, in turns, while the other one is stopped."""
    try:
        for job, _ in pair:
            await job.start()
            job.stop()
        for cycle in range(CYCLES):
            # Each goes first equally often, and every second leave is that of rank 0.
            for job, runs in pair[:: 1 - cycle % 2 * 2]:
                await job.go_on()
                await asyncio.sleep(SETTLED_S)
                runs.left.append(await job.leave(job.hosts[-(cycle // 2 % 2)]))
                await asyncio.sleep(SETTLED_S)
                runs.joined.append(await job.join())
                job.stop()
                took = f"left in {runs.left[-1]:.2f} s; joined in {runs.joined[-1]:.2f} s"
                say(f"{type(job).__name__}: {took}")
    finally:
        for job, _ in pair:
            await job.end()


def figures(muster: Runs, ssh: Runs) -> list[Figure]:
    """Build the figures of the measurements."""
    name = "OpenSSH, a bare file"
    return [
        of_runs(
            "horovod/SIGTERM to the worker's end and the others' step",
            "s",
            Bar("value", "<=", 1.3),
            muster.left,
            ssh.left,
            name,
        ),
        of_runs(
            "horovod/SIGTERM to the worker's end and the others' step, p99",
            "s",
            Bar("value", "<=", 2.5),
            muster.left,
            ssh.left,
            name,
            by=p99,
        ),
        of_runs(
            "horovod/join to the first step",
            "s",
            Bar("ratio", "<=", 1.1),
            muster.joined,
            ssh.joined,
            name,
        ),
    ]
