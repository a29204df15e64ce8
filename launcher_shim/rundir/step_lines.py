# SPDX-License-Identifier: Apache-2.0
"""How far the ranks of this pod are, as much of it as counting their steps takes.

A line stays when its rank has ended, until another rank of that number takes its place.
"""

from __future__ import annotations

import json
import os
from typing import NamedTuple, Optional, Tuple

from launcher_shim.rundir.progress_line import read_whole


class StepLine(NamedTuple):
    """One process at one moment.

    ``process`` is its number and its start, which together no other process has. ``first`` is the
    first step that it told of, None where it does not say; both are -1 before its first boundary.
    """

    process: Tuple[int, int]
    first: Optional[int]
    step: int


def read_steps(directory: "os.PathLike[str] | str") -> Tuple[StepLine, ...]:
    """Read the line of every rank; one that is no progress line is left out."""
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
