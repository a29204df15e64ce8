# SPDX-License-Identifier: Apache-2.0
"""``shards``: four nodes, one five times slower; two are killed, one joins: beside the ideal time.

The ideal time of a world is that of its records if all of its ranks work all the time, each at its
own pace. Counted from a world's first record to its last: ``recover`` and ``join`` measure
restarts.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from benchmarks import shard_contention
from benchmarks.figures import Bar, Figure, of_one, of_runs, say, say_load
from tests.support.training.shard_history import RankLog, repeated_and_lost, worlds

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "support" / "scripts" / "shards_loop.py"
RECORDS, RECORD_S, SLICE_S = 12_000, 0.005, 0.5
SLOW, TIMES = "node-3", 5
EVENTS = ("kill:node-1@world4+6s", "kill:node-2@world3+6s", "add@world2+6s")
WITHIN_S = 600.0
"""Time limit for a process that hangs."""


async def measure() -> list[Figure]:
    """Run one job, and then the contention of a hundred ranks."""
    say_load()
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as directory:
        checkpoints = Path(directory) / "checkpoints"
        status = await _run(Path(directory), checkpoints)
        lived = worlds(checkpoints)
        repeated, lost = repeated_and_lost(checkpoints, RECORDS, 1)
    took = [max(log.last_unix_s for log in logs) - _first_unix_s(logs) for logs in lived]
    ideal = [_ideal_s(logs) for logs in lived]
    for one_took, one_ideal, logs in zip(took, ideal, lived, strict=True):
        say(f"{len(logs)} ranks: {one_took:.1f} s, ideal {one_ideal:.1f} s")
    return [
        of_runs(
            "shards/time in which four worlds trained, beside the ideal",
            "s",
            Bar("ratio", "<=", 1.1),
            took,
            ideal,
            "every rank works all the time",
            by=sum,
        ),
        of_one(
            "shards/records lost or repeated", "1", Bar("value", "==", 0), len(repeated) + len(lost)
        ),
        of_one("shards/exit status", "1", Bar("value", "==", 0), status),
        *await shard_contention.measure(),
    ]


def _pace_s(log: RankLog) -> float:
    return RECORD_S * (TIMES if log.node == SLOW else 1)


def _first_unix_s(logs: list[RankLog]) -> float:
    """Return the start of a world's training: all of its ranks wait for the last one."""
    return max(log.first_unix_s for log in logs)


def _ideal_s(logs: list[RankLog]) -> float:
    records = sum(len(records) for log in logs for _, _, records in log.trained)
    return records / sum(1 / _pace_s(log) for log in logs)


async def _run(directory: Path, checkpoints: Path) -> int:
    await asyncio.to_thread(checkpoints.mkdir)
    events = [part for one in EVENTS for part in ("--event", one)]
    settings = {
        "SHARDS_RECORDS": RECORDS,
        "SHARDS_RECORD_S": RECORD_S,
        "SHARDS_SLICE_S": SLICE_S,
        "SHARDS_BATCH": 2,
        "SHARDS_SLOW": SLOW,
        "CHECKPOINT_DIR": checkpoints,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "muster", "local", "--nodes=4", "--min=1", "--max=4"),
        *("--lease-ttl=5", *events, f"--log-dir={directory / 'logs'}", "--json"),
        *("--", "torchrun", str(SCRIPT)),
        stdout=asyncio.subprocess.DEVNULL,
        env={**os.environ, **{name: str(one) for name, one in settings.items()}},
    )
    async with asyncio.timeout(WITHIN_S):
        return await process.wait()
