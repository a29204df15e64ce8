# SPDX-License-Identifier: Apache-2.0
"""Many seeds on a few processes: which of them fail, how long they take, what they reach."""

from __future__ import annotations

import gc
import multiprocessing
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.simulation.coverage import signs
from tests.simulation.simulation import plot_of, simulate

PIECE = 20
"""So many seeds are handed to a process at a time."""


@dataclass(slots=True)
class Tally:
    """What became of some seeds. ``failures``: by what was broken, the seeds. ``cpu_s``: of all."""

    seeds: int = 0
    cpu_s: float = 0.0
    virtual_s: float = 0.0
    failures: dict[str, list[tuple[str, int]]] = field(default_factory=lambda: defaultdict(list))
    reached: Counter[str] = field(default_factory=Counter)
    plots: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Count the seeds of ``other`` too."""
        self.seeds += other.seeds
        self.cpu_s += other.cpu_s
        self.virtual_s += other.virtual_s
        self.reached += other.reached
        self.plots += other.plots
        for what, where in other.failures.items():
            self.failures[what] += where

    def text(self) -> str:
        """One line, and one more for each kind of failure with its seeds."""
        failed = sum(map(len, self.failures.values()))
        lines = [
            f"{self.seeds} seeds, {failed} failed; {self.cpu_s:.1f} s of CPU,"
            f" {self.virtual_s / 3600:.1f} h of virtual time"
        ]
        for what, where in sorted(self.failures.items()):
            seeds = ", ".join(f"{plot} {seed}" for plot, seed in where)
            lines.append(f"{len(where):5}  {what}: {seeds}")
        return "\n".join(lines)

    def coverage(self) -> str:
        """In how many seeds each thing happened, the rarest last."""
        rows = [*self.plots.most_common(), *self.reached.most_common()]
        return "\n".join(f"{count:7}  {name}" for name, count in rows)


def run(seeds: Sequence[int], plot: str, processes: int) -> Iterator[Tally]:
    """Run all of ``seeds``; yields the tally so far after each piece.

    ``plot``: the name of one; empty: that which each seed draws.
    """
    total = Tally()
    pieces = [(seeds[at : at + PIECE], plot) for at in range(0, len(seeds), PIECE)]
    # No garbage collection looks through what has been imported: it takes a fifth of the time.
    with multiprocessing.Pool(processes, initializer=gc.freeze) as pool:
        for piece in pool.imap_unordered(_piece, pieces):
            total.add(piece)
            yield total


def _kind(failure: BaseException) -> str:
    """What was broken, without the names and numbers of one story."""
    line = f"{type(failure).__name__}: {failure}".partition("\n")[0]
    return re.sub(r"\[.*?\]|\(.*|'.*?'|\b[a-h]\b|\d+(\.\d+)?", "*", line)


def _piece(asked: tuple[Sequence[int], str]) -> Tally:
    seeds, plot = asked
    tally = Tally()
    began_s = time.process_time()
    for seed in seeds:
        outcome = simulate(seed, plot=plot)
        name = plot or plot_of(seed)
        tally.seeds += 1
        tally.virtual_s += outcome.virtual_s
        tally.plots[f"plot {name}"] += 1
        tally.reached.update(f"event {told}" for told in outcome.told)
        tally.reached.update(signs(outcome.timeline))
        if outcome.failure is not None:
            tally.failures[_kind(outcome.failure)].append((name, seed))
    tally.cpu_s = time.process_time() - began_s
    return tally
