# SPDX-License-Identifier: Apache-2.0
"""What the ranks of one node tell of themselves, as ``import muster`` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_NUMBERS = ("pid", "rank", "world_size", "restart", "step")


@dataclass(frozen=True, slots=True)
class Progress:
    """One rank at one moment. ``at_unix_s`` is this machine's wall clock."""

    pid: int
    rank: int
    world_size: int
    restart: int
    step: int
    at_unix_s: float


def read_progress(directory: Path) -> tuple[Progress, ...]:
    """The ranks whose processes are alive, by rank; a file that is no progress file is left out."""
    found = []
    for path in directory.glob("*.json"):
        try:
            fields = json.loads(path.read_text())
            pid, rank, world_size, restart, step = (int(fields[name]) for name in _NUMBERS)
            at_unix_s = float(fields["time"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the training script may write what it wants there
        if Path(f"/proc/{pid}").exists():
            found.append(Progress(pid, rank, world_size, restart, step, at_unix_s))
    return tuple(sorted(found, key=lambda progress: progress.rank))


def newest_rank_0(everybody: Iterable[Progress]) -> Progress | None:
    """Rank 0 of the present world: where an old one still lingers, the one that spoke last."""
    leaders = [progress for progress in everybody if progress.rank == 0]
    return max(leaders, key=lambda progress: progress.at_unix_s, default=None)
