# SPDX-License-Identifier: Apache-2.0
"""The progress of one node's ranks, as ``import muster`` reports it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agent.rundir.progress import is_gone, read_lines


@dataclass(frozen=True, slots=True)
class Progress:
    """One rank at one moment.

    ``at_unix_s`` is this machine's wall clock. ``every``: more than 1 if only each so manieth step
    is known, as of a script that prints them.
    """

    pid: int
    rank: int
    world_size: int
    restart: int
    step: int
    at_unix_s: float
    every: int = 1


def read_progress(directory: Path) -> tuple[Progress, ...]:
    """Read the progress of the live ranks that have reached a step boundary, by rank."""
    ranks = (
        Progress(line.pid, line.rank, line.world_size, line.restart, line.step, line.at_unix_s)
        for line in read_lines(directory)
        if line.step >= 0 and not is_gone(line)
    )
    return tuple(sorted(ranks, key=lambda progress: progress.rank))


def newest_rank_0(everybody: Iterable[Progress]) -> Progress | None:
    """Return rank 0 of the present world: the latest to report, if an old one has not ended."""
    leaders = [progress for progress in everybody if progress.rank == 0]
    return max(leaders, key=lambda progress: progress.at_unix_s, default=None)
