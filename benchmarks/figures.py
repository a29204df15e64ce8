# SPDX-License-Identifier: Apache-2.0
"""The result of a benchmark: figures, each one JSON line, with its runs for the picture."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal


@dataclass(frozen=True, slots=True)
class Bar:
    """The requirement on a figure: a limit on its value, or on its ratio to the baseline."""

    what: Literal["value", "ratio"]
    op: Literal["<=", ">=", "=="]
    limit: float

    def __str__(self) -> str:
        return f"{self.what} {self.op} {self.limit:g}"

    def holds(self, number: float) -> bool:
        if self.op == "==":
            return number == self.limit
        return number <= self.limit if self.op == "<=" else number >= self.limit


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure; ``value`` and ``baseline`` summarize ``runs`` and ``baseline_runs``.

    ``baseline_name`` describes the baseline; a figure without a bar is shown and not judged.
    """

    name: str
    value: float
    unit: str
    bar: Bar | None
    runs: tuple[float, ...]
    baseline: float | None = None
    baseline_name: str = ""
    baseline_runs: tuple[float, ...] = ()

    @property
    def ratio(self) -> float | None:
        if self.baseline is None or self.baseline == 0:
            return None
        return self.value / self.baseline

    @property
    def ok(self) -> bool:
        if self.bar is None:
            return True
        judged = self.value if self.bar.what == "value" else self.ratio
        return judged is not None and self.bar.holds(judged)

    def line(self) -> str:
        return json.dumps(
            {
                "name": self.name,
                "value": _short(self.value),
                "unit": self.unit,
                "baseline": _short(self.baseline),
                "ratio": _short(self.ratio),
                "bar": None if self.bar is None else str(self.bar),
                "ok": self.ok,
            }
        )


def of_runs(
    name: str,
    unit: str,
    bar: Bar | None,
    runs: Sequence[float],
    baseline_runs: Sequence[float] = (),
    baseline_name: str = "",
    by: Callable[[Sequence[float]], float] = median,
) -> Figure:
    """Build the figure whose value and baseline are the medians of their runs, or ``by`` others."""
    baseline = by(baseline_runs) if baseline_runs else None
    own, other = tuple(runs), tuple(baseline_runs)
    return Figure(name, by(runs), unit, bar, own, baseline, baseline_name, other)


def of_one(name: str, unit: str, bar: Bar | None, value: float) -> Figure:
    """Build the figure of what was measured once."""
    return Figure(name, value, unit, bar, (value,))


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return percentile(values, 0.99)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of all values do not exceed."""
    # Rounded, because 0.07 times 100 is slightly above 7.
    return sorted(values)[max(0, math.ceil(round(len(values) * share, 6)) - 1)]


def say(text: str) -> None:
    """Tell the caller how a benchmark goes on."""
    print(text, file=sys.stderr, flush=True)


def say_load() -> None:
    """Tell how busy the machine is before a benchmark begins."""
    say(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def _short(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.4g}")
