# SPDX-License-Identifier: Apache-2.0
"""``gather``: eight nodes come back over two minutes, beside a world of two that trains.

Each world that forms costs all ranks a restart. The figures are the number of worlds, and the share
of the time from the first newcomer to 20 s after the last one in which steps were made: with the
default gather window, with none, and with torchrun's own rendezvous.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from agent.config import Config
from benchmarks.figures import Bar, Figure, of_one, of_runs, say, say_load
from rdzv.settings import settings_of

NEWCOMERS = 8
BEGIN_S = 25.0
"""Start of the first newcomer; by then the two initial nodes train."""
SPREAD_S = 120.0
JUDGED_S = SPREAD_S + 20.0
"""Duration of the evaluation from the first newcomer; the last one needs a while to start."""
END_S = BEGIN_S + JUDGED_S + 20.0
PAUSE_S = 1.0
"""Threshold of lost time between two points of the report: steps take 0.05 s, and the report has a
few points per second."""
WITHIN_S = 600.0
"""Time limit for a process that hangs."""

SCRIPT = """
import os, time
import muster

step = (muster.last_commit() or 0) + 1
with muster.drain() as drain:
    while time.time() < float(os.environ["GATHER_BENCH_END"]):
        time.sleep(0.05)
        if drain.commit_due(step):
            drain.committed(step)
        step += 1
"""


class Run(NamedTuple):
    """The result of one run: worlds that formed for newcomers, and the share of time trained."""

    worlds: int
    trained: float


async def measure() -> list[Figure]:
    """Run the three variants, one after the other."""
    say_load()
    window = settings_of(Config)["gather_s"].default
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as directory:
        root = Path(directory)
        gathered = await _run(root / "gathered", f"--gather={window}")
        single = await _run(root / "single", "--gather=0s")
        native = await _run(root / "native", "--native")
    return [
        of_runs(
            "gather/worlds for eight nodes that come within 120 s",
            "1",
            Bar("value", "<=", 2),
            [gathered.worlds],
            [single.worlds],
            "--gather 0s",
        ),
        of_runs(
            "gather/share of those 140 s in which steps were made",
            "1",
            Bar("value", ">=", 0.95),
            [gathered.trained],
            [single.trained],
            "--gather 0s",
        ),
        of_one("gather/the same by torchrun's own rendezvous: worlds", "1", None, native.worlds),
        of_one("gather/the same by torchrun's own rendezvous: share", "1", None, native.trained),
    ]


async def _run(directory: Path, option: str) -> Run:
    script, report = directory / "train.py", directory / "report"
    await asyncio.to_thread(_write_script, script)
    adds = [f"add@{BEGIN_S + SPREAD_S * at / (NEWCOMERS - 1):.0f}s" for at in range(NEWCOMERS)]
    events = [part for one in adds for part in ("--event", one)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "muster", "local", "--nodes=2", f"--max={NEWCOMERS + 2}"),
        *(option, *events, f"--report={report}", f"--log-dir={directory / 'logs'}", "--json"),
        *("--", "torchrun", str(script)),
        stdout=asyncio.subprocess.DEVNULL,
        env={**os.environ, "GATHER_BENCH_END": str(time.time() + END_S)},
    )
    async with asyncio.timeout(WITHIN_S):
        status = await process.wait()
    told = json.loads(await asyncio.to_thread((report / "timeline.json").read_text))
    run = judged(told)
    say(f"{option}: {run.worlds} worlds, {run.trained:.1%}, status {status}")
    return run


def _write_script(script: Path) -> None:
    script.parent.mkdir()
    script.write_text(SCRIPT)


def judged(told: Mapping[str, Any]) -> Run:
    """Count the worlds that formed for newcomers, and the share of time with steps."""
    last_s = BEGIN_S + JUDGED_S
    points = sorted(at_s for world in told["worlds"] for at_s, _ in world["points"])
    during = [BEGIN_S, *(at_s for at_s in points if BEGIN_S <= at_s <= last_s), last_s]
    lost_s = sum(two - one for one, two in pairwise(during) if two - one > PAUSE_S)
    firsts = [world["points"][0][0] for world in told["worlds"] if world["points"]]
    return Run(sum(first_s > BEGIN_S for first_s in firsts), 1 - lost_s / JUDGED_S)
