# SPDX-License-Identifier: Apache-2.0
"""The cost of a step boundary: ``commit_due`` with no drain, beside a loop without it.

The gate's page is in a real directory on disk and changes between two blocks, as in a job; the loop
without it makes the same steps. Blocks of both take turns.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from statistics import median

from agent.rundir.channels import GatePage
from benchmarks.figures import Bar, Figure, of_runs
from muster.draining import Drain
from muster.gate import GateFile
from muster.progress import ProgressFile
from rdzv.drain.gate import Gate

ROUNDS = 60
STEPS = 2000
WORK = 50
"""Number of additions in a step, so that the loop has some work: about a microsecond."""


async def measure() -> list[Figure]:
    """Time every boundary, in turns with a bare loop."""
    return _measure()


def _measure() -> list[Figure]:
    with_drain: list[float] = []
    bare: list[float] = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as directory:
        gate = GatePage(Path(directory, "gate.page"))
        gate.make()
        environ = {"TORCHELASTIC_RUN_ID": "job", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "40123"}
        drain = Drain(ProgressFile(f"{directory}/progress", environ), GateFile(directory))
        gate.put(Gate(run="job", round=0, master="10.0.0.7:40123").to_json(), 0)
        with drain:
            for turn in range(ROUNDS):
                gate.put(Gate(run="job", round=0, master="10.0.0.7:40123", epoch=turn).to_json(), 0)
                first = turn * STEPS
                times = [_step_us(drain, step) for step in range(first, first + STEPS)]
                with_drain.append(median(times))
                times = [_step_us(None, step) for step in range(STEPS)]
                bare.append(median(times))
    added = [one - other for one, other in zip(with_drain, bare, strict=True)]
    return [
        of_runs(
            "step: commit_due with no drain pending, progress included",
            "us",
            Bar("value", "<=", 20.0),
            added,
            bare,
            "the same loop without it",
        ),
    ]


def _step_us(drain: Drain | None, step: int) -> float:
    began_ns = time.perf_counter_ns()
    total = 0
    for number in range(WORK):
        total += number
    if drain is not None and drain.commit_due(step):
        raise AssertionError("a save was asked for with no drain going")
    return (time.perf_counter_ns() - began_ns) / 1000
