# SPDX-License-Identifier: Apache-2.0
"""What a process has taken of the processor, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path


def cpu_s(pid: int) -> float:
    """CPU time of all its threads in seconds, to the nanosecond where the kernel tells it."""
    return sum(
        int(task.joinpath("schedstat").read_text().split()[0]) / 1e9
        for task in Path(f"/proc/{pid}/task").iterdir()
    )
