# SPDX-License-Identifier: Apache-2.0
"""The processor time of a process, as the kernel accounts for it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def cpu_s(pid: int) -> float:
    """Return the CPU time in seconds: of all living threads in ns, or of the process in ticks.

    The former if the kernel provides it. Raises ``OSError`` if there is no such process.
    """
    process = Path(f"/proc/{pid}")
    if not (process / "schedstat").exists():
        # utime and stime; the name before them, in parentheses, may contain anything.
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    total_s = 0.0
    for task in (process / "task").iterdir():
        # A thread may have ended since the listing.
        with suppress(FileNotFoundError, ProcessLookupError):
            total_s += int((task / "schedstat").read_text().split()[0]) / 1e9
    return total_s
