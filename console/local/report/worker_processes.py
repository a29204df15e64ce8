# SPDX-License-Identifier: Apache-2.0
"""The workers of a torchrun, found among its descendants by the variables that it sets.

Linux only: reads ``/proc``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from console.local.processes.marked import children

DEPTH = 4
"""Generations below the container's first process: muster-run, torchrun, a wrapper, the worker."""


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """One worker: its place in the world, and the address of that world's master."""

    pid: int
    rank: int
    world_size: int
    restart: int
    master: str


def find_workers(first: int) -> list[WorkerProcess]:
    """Find the workers below the process ``first``, by rank."""
    found, level = [], {first}
    for _ in range(DEPTH):
        below: set[int] = set()
        for pid in level:
            worker = _worker(pid)
            if worker is not None:
                found.append(worker)  # its children have its variables, too
            else:
                below |= children(pid)
        level = below
    return sorted(found, key=lambda worker: worker.rank)


def _worker(pid: int) -> WorkerProcess | None:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None  # it has ended
    variables = dict(entry.split(b"=", 1) for entry in environment if b"=" in entry)
    if b"TORCHELASTIC_RUN_ID" not in variables:
        return None
    try:
        return WorkerProcess(
            pid,
            int(variables[b"RANK"]),
            int(variables[b"WORLD_SIZE"]),
            int(variables.get(b"TORCHELASTIC_RESTART_COUNT", b"0")),
            b":".join((variables[b"MASTER_ADDR"], variables[b"MASTER_PORT"])).decode(),
        )
    except (KeyError, ValueError):
        return None
