# SPDX-License-Identifier: Apache-2.0
"""The number of steps that the ranks of one torchrun have made, from their reports: pure.

A torchrun starts its workers again several times. A job that goes on from a checkpoint repeats some
steps then, and a script may count from 0 each time: so the number is how far the job has come since
the first step that this torchrun's ranks reported.
"""

from __future__ import annotations

from typing import Dict, Iterable, Mapping, NamedTuple, Optional, Tuple

from launcher_shim.rundir.step_lines import StepLine


class StepCount(NamedTuple):
    """The count of one torchrun's steps.

    ``began``: by process, the step from which its own steps count. ``first`` is that of the first
    process that has made one, ``highest`` the highest step of all. ``told``: whether a rank has
    reported anything.
    """

    began: Mapping[Tuple[int, int], int]
    first: Optional[int] = None
    highest: int = -1
    told: bool = False

    @property
    def made(self) -> Optional[int]:
        """The number of steps made; None while no rank has reported anything."""
        if self.first is not None:
            return self.highest - self.first
        return 0 if self.told else None

    def seen(self, lines: Iterable[StepLine]) -> StepCount:
        """Return the count after the ranks' present reports."""
        count = self
        for line in lines:
            count = count._with(line)
        return count

    def _with(self, line: StepLine) -> StepCount:
        before = self.began.get(line.process)
        if before is not None and line.step <= before:
            return self  # it may have ended before this torchrun was there
        if line.step < 0:
            return self._replace(told=True)
        if before is None or before < 0:
            before = line.step if line.first is None or line.first < 0 else line.first
        known: Dict[Tuple[int, int], int] = {**self.began, line.process: before}
        first = before if self.first is None else self.first
        return StepCount(known, first, max(self.highest, line.step), told=True)


def count_from(lines: Iterable[StepLine]) -> StepCount:
    """Begin to count at ``lines``, whose processes were there before, and may have ended."""
    return StepCount({line.process: line.step for line in lines})
