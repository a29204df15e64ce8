# SPDX-License-Identifier: Apache-2.0
"""The ranks' progress in this pod, as far as the count of their steps needs it.

A line stays after its rank has ended, until another rank of that number replaces it.
"""

from __future__ import annotations

import json
import os
from typing import NamedTuple, Optional, Tuple

from launcher_shim.rundir.progress_line import read_whole


class StepLine(NamedTuple):
    """One process's report at one moment.

    ``process`` is its number and its start time, which together no other process has. ``first`` is
    the first step that it reported, None if it does not say; both steps are -1 before its first
    boundary.
    """

    process: Tuple[int, int]
    first: Optional[int]
    step: int


def read_steps(directory: "os.PathLike[str] | str") -> Tuple[StepLine, ...]:
    """Read the line of every rank; skip files that are no progress lines."""
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(".json"))
    except OSError:
        return ()
    lines = (_read(os.path.join(directory, name)) for name in names)
    return tuple(line for line in lines if line is not None)


def _read(path: str) -> Optional[StepLine]:
    content = read_whole(path)
    try:
        fields = json.loads(content or b"null")
        first = fields.get("first")
        return StepLine(
            (int(fields["pid"]), int(fields["started"])),
            None if first is None else int(first),
            int(fields["step"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
