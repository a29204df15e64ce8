# SPDX-License-Identifier: Apache-2.0
"""``losses``: a node of three is cut off without a word, or all that runs on it is killed.

The nodes are network namespaces (needs root), the leases so long that only an eviction counts, and
the workers warm. The times are from the loss until the others have evicted the node, and until all
of them have made a step in the next world. The parts between are those of the sidecars' logs.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Literal

from benchmarks.figures import Bar, Figure, of_runs, say, say_load
from tests.support.training.background import Background
from tests.support.training.machine_job import MachineJob, machine_job
from tests.support.training.pods import Node

TURNS = 4
LEASE_S = 600.0
STEPS = 40
SCRIPT = Path(__file__).parents[1] / "tests" / "support" / "scripts" / "drain_loop.py"
BARS = {"cut": (3.5, 5.0), "kill": (2.0, 3.5)}
"""For the eviction and for the next step, in seconds."""

PARTS = {
    "evicted": "evicting ",
    "the world ends": "is to form again in the store",
    "its workers have ended": "is over: all",
    "all ask": "is complete in the store",
}
"""The parts of a recovery, by the last line about each in a survivor's log."""


async def measure(turns: int = TURNS) -> list[Figure]:
    """Cut and kill in turns, each in a world of three."""
    say_load()
    return await asyncio.to_thread(_measured, turns)


def _measured(turns: int) -> list[Figure]:
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in BARS}
    with Background() as background, tempfile.TemporaryDirectory(prefix="muster-bench-") as root:
        for turn in range(turns):
            with machine_job(
                Path(root) / f"{turn}",
                background,
                least=2,
                lease_s=LEASE_S,
                wrapped=True,
                script=SCRIPT,
                sidecar_environ={"MUSTER_WARM": "1", "MUSTER_LOG_FORMAT": "json"},
                script_environ={"OMP_NUM_THREADS": "1"},
            ) as job:
                job.add(3)
                found["cut"].append(_lost(job, "cut", turn))
                job.add(1)
                found["kill"].append(_lost(job, "kill", turn))
    figures = []
    for kind, what in (("cut", "a node is cut off"), ("kill", "all on a node is killed")):
        evicted, stepped = (list(column) for column in zip(*found[kind], strict=True))
        bars = [Bar("value", "<=", limit_s) for limit_s in BARS[kind]]
        figures.append(of_runs(f"losses/{what}: evicted", "s", bars[0], evicted))
        figures.append(of_runs(f"losses/{what}: next step", "s", bars[1], stepped))
    return figures


def _lost(job: MachineJob, kind: Literal["cut", "kill"], turn: int) -> tuple[float, float]:
    """Lose one node; return the seconds until it was evicted, and until the others' next step."""
    nodes = list(job.nodes.values())
    world = job.world_of(nodes)
    job.goes_on(world, STEPS)
    lost = nodes.pop(turn % len(nodes))
    began_s, began_unix_s = time.monotonic(), time.time()
    (job.cut if kind == "cut" else job.kill_node)(lost)
    stepped_s = job.world_of(nodes, not_=world).began_s - began_s
    parts = {
        what: max(at_s for node in nodes for at_s in _said(node, line, began_unix_s))
        for what, line in PARTS.items()
        if any(True for node in nodes for _ in _said(node, line, began_unix_s))
    }
    parted = ", ".join(f"{what} {at_s - began_unix_s:.2f}" for what, at_s in parts.items())
    say(f"{kind} of {lost.name}: {parted}, next step {stepped_s:.2f} s")
    return parts["evicted"] - began_unix_s, stepped_s


def _said(node: Node, words: str, since_unix_s: float) -> Iterator[float]:
    """Yield when a sidecar has logged a line with ``words``."""
    for text in node.sidecar_log().splitlines():
        if not re.match(r"\{.*\}$", text):
            continue
        line = json.loads(text)
        at_s = datetime.fromisoformat(line["time"]).timestamp()
        if words in line["message"] and at_s >= since_unix_s:
            yield at_s
