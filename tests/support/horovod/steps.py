# SPDX-License-Identifier: Apache-2.0
"""The steps that workers under Horovod have applied, as ``horovod_steps.py`` tells of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Step:
    """One step that one worker has applied. ``at_s`` is monotonic."""

    at_s: float
    host: str
    pid: int
    rank: int
    size: int
    number: int
    weight: float

    @property
    def pod(self) -> str:
        """The node or pod that it ran in."""
        return self.host.partition(".")[0]


def read_steps(directory: Path) -> list[Step]:
    """Every step that was applied, in the order of time."""
    steps = []
    for path in directory.iterdir():
        host, _, pid = path.name.rpartition(".")
        whole, _, _ = path.read_text().rpartition("\n")  # half a line may be the last
        for line in whole.splitlines():
            at_s, rank, size, number, weight = line.split()
            told = (int(rank), int(size), int(number), float(weight))
            steps.append(Step(float(at_s), host, int(pid), *told))
    return sorted(steps, key=lambda step: step.at_s)
