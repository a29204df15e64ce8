# SPDX-License-Identifier: Apache-2.0
"""Worlds of real torchruns: waits for one, and the restart time of a bare torchrun."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence, Set
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.etcd_members import free_port
from benchmarks.node_processes import Torchrun

SETTLED_S = 2.0
"""Time for which a world makes steps before something is done to it."""

DEADLINE_S = 90.0


async def bare_restart(directory: Path) -> float:
    """Measure a bare torchrun from SIGKILL of one of two workers to a step of the restarted two."""
    async with torchruns() as running:
        torchrun = Torchrun(directory, {}, "--standalone", "--nproc-per-node=2", "--max-restarts=9")
        running.append(torchrun)
        await torchrun.start()
        await until_world([torchrun], size=2, workers=2)
        before = torchrun.steps.pids
        killed_s = time.monotonic()
        os.kill(min(before), signal.SIGKILL)
        return await until_world([torchrun], size=2, workers=2, without=before) - killed_s


async def until_world(
    torchruns: Sequence[Torchrun],
    *,
    size: int,
    workers: int = 1,
    without: Set[int] = frozenset(),
) -> float:
    """Wait until new workers of all ``torchruns`` have made steps in one world for ``SETTLED_S``.

    Returns the time at which the last of them made its first step.
    """
    async with asyncio.timeout(DEADLINE_S):
        while True:
            await asyncio.sleep(0.1)
            firsts: list[float] = []
            for torchrun in torchruns:
                if torchrun.ended:
                    raise RuntimeError(f"a torchrun ended:\n{torchrun.last_words()}")
                for pid in (torchrun.workers() & torchrun.steps.pids) - without:
                    steps = torchrun.steps.of(pid)
                    if steps and steps[-1].size == size:
                        firsts.append(steps[0].at_s)
            settled = len(firsts) == workers * len(torchruns)
            if settled and time.monotonic() - max(firsts) >= SETTLED_S:
                return max(firsts)


@asynccontextmanager
async def torchruns() -> AsyncIterator[list[Torchrun]]:
    running: list[Torchrun] = []
    try:
        yield running
    finally:
        for torchrun in running:
            await torchrun.kill()


async def start_native(
    directory: Path, running: list[Torchrun], nodes: int, size: tuple[int, int]
) -> None:
    """Start torchruns with torch's own c10d, hosted by the first; appends them to ``running``."""
    port = free_port()
    for number in range(nodes):
        running.append(
            Torchrun(
                directory / f"node-{number}",
                {"PET_LOCAL_ADDR": "127.0.0.1"},
                f"--nnodes={size[0]}:{size[1]}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{port}",
                "--rdzv-id=native",
                f"--rdzv-conf=is_host={int(number == 0)},last_call_timeout=3",
                "--max-restarts=9",
            )
        )
        await running[-1].start()
