# SPDX-License-Identifier: Apache-2.0
"""``footprint``: the cost of one real ``muster agent``, on a real etcd.

Memory and CPU are measured beside a connected torchrun that trains; the start from the creation of
the process to the first ready answer of ``/readyz``, which includes the registration, by the clock
and by the processor.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

from benchmarks.etcd_members import etcd_server
from benchmarks.figures import Bar, Figure, of_one, of_runs, say
from benchmarks.node_processes import Sidecar, Torchrun
from benchmarks.processor_time import cpu_s
from benchmarks.resident_memory import rss_mib
from console.local import processes

STARTS = 7
REST_S = 60.0
SETTLE_S = 10.0
TRAINS_WITHIN_S = 60.0


async def measure(starts: int = STARTS, rest_s: float = REST_S) -> list[Figure]:
    """Start the sidecar ``starts`` times, then leave it at rest beside a torchrun."""
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(etcd_server())
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
        started: list[float] = []
        start_cpu_s: list[float] = []
        bare: list[float] = []
        for number in range(starts):
            bare.append(await _python_start())
            wall_s, used_s = await _start(root / f"start-{number}", endpoint)
            started.append(wall_s)
            start_cpu_s.append(used_s)
        say(f"ready after {median(started):.2f} s")
        rss_mib, cpu_percent = await _at_rest(root / "rest", endpoint, rest_s)
    return [
        of_runs(
            "footprint/start to registered",
            "s",
            Bar("value", "<=", 1.5),
            started,
            bare,
            "an empty Python",
        ),
        of_runs("footprint/CPU of the start", "s", Bar("value", "<=", 0.25), start_cpu_s),
        of_one("footprint/RSS", "MiB", Bar("value", "<=", 42), rss_mib),
        of_one("footprint/CPU at rest", "%", Bar("value", "<=", 0.12), cpu_percent),
    ]


async def _python_start() -> float:
    began_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await process.wait()
    return time.monotonic() - began_s


async def _start(run_dir: Path, endpoint: str) -> tuple[float, float]:
    """Measure a start until ready, in seconds and CPU seconds; then end the sidecar gracefully."""
    sidecar = Sidecar(run_dir, run_dir.name, "node-0", endpoint, (1, 1))
    began_s = time.monotonic()
    await sidecar.start()
    try:
        await sidecar.ready()
        return time.monotonic() - began_s, cpu_s(sidecar.pid)
    finally:
        assert sidecar.process is not None
        await processes.end_child(sidecar.process, 5.0)


async def _at_rest(run_dir: Path, endpoint: str, rest_s: float) -> tuple[float, float]:
    """Measure RSS in MiB and CPU in percent of a core, for ``rest_s`` seconds beside a torchrun."""
    sidecar = Sidecar(run_dir, run_dir.name, "node-0", endpoint, (1, 1))
    await sidecar.start()
    torchrun: Torchrun | None = None
    try:
        await sidecar.ready()
        directory = run_dir.with_name(f"{run_dir.name}.torchrun")
        torchrun = Torchrun(directory, sidecar.torch_environment())
        await torchrun.start()
        async with asyncio.timeout(TRAINS_WITHIN_S):
            while not torchrun.steps.pids:  # noqa: ASYNC110 - a process has no event to give
                await asyncio.sleep(0.1)
        await asyncio.sleep(SETTLE_S)
        assert sidecar.process is not None
        before_s = cpu_s(sidecar.process.pid)
        await asyncio.sleep(rest_s)
        used_s = cpu_s(sidecar.process.pid) - before_s
        if torchrun.ended:
            raise RuntimeError(f"the torchrun ended:\n{torchrun.last_words()}")
        return rss_mib(sidecar.process.pid), 100 * used_s / rest_s
    finally:
        if torchrun is not None:
            await torchrun.kill()
        await sidecar.kill()
