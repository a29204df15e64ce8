# SPDX-License-Identifier: Apache-2.0
"""The progress of one node's ranks, as ``import muster`` reports it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agent.rundir.reports import is_gone, read_lines
from rdzv.records.progress import RankProgress


@dataclass(frozen=True, slots=True)
class Progress:
    """One rank at one moment.

    ``at_unix_s`` is this machine's wall clock. ``every``: more than 1 if only each so manieth step
    is known, as of a script that prints them. ``master``: the name of its round. ``world``: the
    number of the world in that round that has formed in place; 0 for none.
    """

    pid: int
    rank: int
    world_size: int
    restart: int
    step: int
    at_unix_s: float
    every: int = 1
    master: str = ""
    world: int = 0


def read_progress(directory: Path) -> tuple[Progress, ...]:
    """Read the progress of the live ranks that have reached a step boundary, by rank."""
    ranks = (_of(line) for line in read_lines(directory) if line.step >= 0 and not is_gone(line))
    return tuple(sorted(ranks, key=lambda progress: progress.rank))


def _of(line: RankProgress) -> Progress:
    counts = (line.rank, line.world_size, line.restart, line.step)
    place = line.in_world
    world = 0 if place is None else max(0, place.number, place.formed)
    return Progress(line.pid, *counts, line.at_unix_s, master=line.master, world=world)


def newest_rank_0(everybody: Iterable[Progress]) -> Progress | None:
    """Return rank 0 of the present world: the latest to report, if an old one has not ended."""
    leaders = [progress for progress in everybody if progress.rank == 0]
    return max(leaders, key=lambda progress: progress.at_unix_s, default=None)
