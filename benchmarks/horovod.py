# SPDX-License-Identifier: Apache-2.0
"""``horovod``: a host leaves a real horovodrun's job, and another one joins it.

Counted from the SIGTERM to the host's container until its worker has ended and every other one has
made its next step, and until all have made a step with the newcomer. The same job on a bare file,
which ``cat`` prints, with OpenSSH to start its workers, goes through the same in turns: what it
takes is horovodrun's look each second, the newcomer's imports, and the reset.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.etcd_server import etcd_server
from benchmarks.figures import Bar, Figure, of_medians, percentile
from benchmarks.horovod_job import HorovodJob, Leave
from benchmarks.horovod_jobs import MusterJob, SshJob
from benchmarks.node_processes import REPOSITORY
from benchmarks.openssh import sshd

ROUNDS = 5
CYCLES = 6
"""Leaves and joins of one job, in each round."""

NODES = 3
SETTLED_S = 1.0
"""A world makes steps for so long before something is done to it."""


STAGES = {
    "delisted": "SIGTERM to a host list without the host",
    "heard": "from then to the last step with it",
    "reset": "from that step to the others' next one",
    "ended": "from that step to its worker's end",
}
"""Of each leave, by the name of ``Leave``."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Every leave, and the seconds of every join, of one kind of job."""

    left: list[Leave] = field(default_factory=list)
    joined: list[float] = field(default_factory=list)


async def measure(rounds: int = ROUNDS) -> list[Figure]:
    """Take pairs of jobs through their changes."""
    muster, ssh = Runs(), Runs()
    async with AsyncExitStack() as stack:
        # Where horovodrun is found, and a worker's python.
        os.environ["PATH"] = os.pathsep.join((await horovod_folder(), os.environ["PATH"]))
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
    """Take two jobs through their leaves and joins, in turns: the other one stands still."""
    try:
        for job, _ in pair:
            await job.start()
            job.stop()
        for cycle in range(CYCLES):
            # Each is the first as often as the other, and every second leave is that of rank 0.
            for job, runs in pair[:: 1 - cycle % 2 * 2]:
                await job.go_on()
                await asyncio.sleep(SETTLED_S)
                runs.left.append(await job.leave(job.hosts[-(cycle // 2 % 2)]))
                await asyncio.sleep(SETTLED_S)
                runs.joined.append(await job.join())
                job.stop()
                stages = ", ".join(
                    f"{name} {seconds:.2f}" for name, seconds in asdict(runs.left[-1]).items()
                )
                print(
                    f"{type(job).__name__}: left in s: {stages}; joined in {runs.joined[-1]:.2f} s",
                    file=sys.stderr,
                )
    finally:
        for job, _ in pair:
            await job.end()


def figures(muster: Runs, ssh: Runs) -> list[Figure]:
    """Judge what was measured."""
    name = "OpenSSH, a bare file"
    left, left_ssh = ([leave.whole for leave in runs.left] for runs in (muster, ssh))
    return [
        of_medians(
            "horovod/SIGTERM to the worker's end and the others' step",
            "s",
            Bar("value", "<=", 1.3),
            left,
            left_ssh,
            name,
        ),
        Figure(
            "horovod/SIGTERM to the worker's end and the others' step, p99",
            percentile(left, 0.99),
            "s",
            Bar("value", "<=", 2.5),
            tuple(left),
            percentile(left_ssh, 0.99),
            name,
            tuple(left_ssh),
        ),
        *(
            of_medians(
                f"horovod/leave: {words}",
                "s",
                None,
                [getattr(leave, stage) for leave in muster.left],
                # For a file, the rename is where the clock begins.
                [getattr(leave, stage) for leave in ssh.left if stage != "delisted"],
                name,
            )
            for stage, words in STAGES.items()
        ),
        of_medians(
            "horovod/join to the first step",
            "s",
            Bar("ratio", "<=", 1.1),
            muster.joined,
            ssh.joined,
            name,
        ),
    ]


async def horovod_folder() -> str:
    """The folder of horovodrun and of a python that has it; builds it if it is not there."""
    if named := os.environ.get("MUSTER_TEST_HOROVOD"):
        return named
    process = await asyncio.create_subprocess_exec(
        REPOSITORY / "scripts" / "toolchain" / "horovod",
        sys.executable,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise SystemExit("horovod could not be made ready.")
    return output.decode().strip()
