# SPDX-License-Identifier: Apache-2.0
"""Whether the ranks of a pod stand still, by what they report: pure.

A rank reports each step or each few steps, and the sidecar looks more seldom. So the usual time
between two reports is the time between two looks, divided by the reports in it; how many steps a
report is follows from the numbers of the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from rdzv.dataclass import dataclass
from rdzv.records.progress import RankProgress

TIMES = 10.0
"""Factor by which a silence must exceed the usual time between two reports."""
STARTS = 10
STARTS_LOOKS = 3
"""Reports, or looks that found new ones, after which a world is no longer one that starts: the
first steps compile. Few looks do not show how many steps a report is."""
KEPT = 9
"""The newest times between reports that are kept: their median is the usual one."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """The steps of a pod's ranks in one round, as far as known.

    ``mark``: all that they reported last, which they did before ``moved_s``, by a monotonic clock.
    ``stride``: the steps of one report. ``gaps_s``: seconds a step. ``made``: how many steps it was
    seen to make.
    """

    master: str = ""
    mark: tuple[object, ...] = ()
    moved_s: float = 0.0
    step: int = -1
    at_unix_s: float = 0.0
    stride: int = 0
    gaps_s: tuple[float, ...] = ()
    made: int = 0

    @property
    def starts(self) -> bool:
        """Whether it has not made enough steps yet to have a usual time."""
        return len(self.gaps_s) < STARTS_LOOKS and self.made < STARTS * max(1, self.stride)

    def term_s(self, least_s: float) -> float:
        """Return how long a silence must last to be one."""
        # ``statistics`` would cost every sidecar half a MiB.
        usual_s = sorted(self.gaps_s)[len(self.gaps_s) // 2] * self.stride if self.gaps_s else 0.0
        return max(least_s, TIMES * usual_s)

    def beat(self, master: str, ranks: Sequence[RankProgress], now_s: float) -> Pulse:
        """Return the pulse after the ranks of round ``master`` were looked at."""
        own = [rank for rank in ranks if rank.master == master]
        mark = tuple(
            (one.local_rank, one.pid, one.step, one.at_unix_s, one.held, one.epoch, one.away)
            for one in own
        )
        if master != self.master:
            return Pulse(master, mark, now_s)
        if mark == self.mark:
            return self
        moved = replace(self, mark=mark, moved_s=now_s)
        furthest = max(own, key=lambda one: one.step, default=None)
        if furthest is None or furthest.step < 0 or furthest.step == self.step:
            return moved
        steps, took_s = furthest.step - self.step, furthest.at_unix_s - self.at_unix_s
        moved = replace(moved, step=furthest.step, at_unix_s=furthest.at_unix_s)
        if self.step < 0 or steps < 0:
            return moved
        return replace(
            moved,
            made=self.made + steps,
            stride=gcd(self.stride, steps),
            gaps_s=(*self.gaps_s, max(0.0, took_s) / steps)[-KEPT:],
        )

    def stands(self, ranks: Sequence[RankProgress], now_s: float, least_s: float) -> bool:
        """Return whether ranks that should make steps make none.

        They need not while they start, save, wait at the gate, or are between two loops.
        """
        own = [rank for rank in ranks if rank.master == self.master]
        if self.starts or not own or now_s - self.moved_s < self.term_s(least_s):
            return False
        return not any(one.held or one.epoch or one.away or one.step < 0 for one in own)
