# SPDX-License-Identifier: Apache-2.0
"""What a process has taken of the processor, as the kernel counts it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def cpu_s(pid: int) -> float:
    """CPU time in seconds: of all threads that live, to the nanosecond, or of the process in ticks.

    The former where the kernel tells it. Raises ``OSError`` if there is no such process.
    """
    process = Path(f"/proc/{pid}")
    if not (process / "schedstat").exists():
        # utime and stime; the name before them, in parentheses, may hold anything.
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    total_s = 0.0
    for task in (process / "task").iterdir():
        # A thread may have ended since it was listed.
        with suppress(FileNotFoundError, ProcessLookupError):
            total_s += int((task / "schedstat").read_text().split()[0]) / 1e9
    return total_s
