# SPDX-License-Identifier: Apache-2.0
"""The resident memory of a process."""

from __future__ import annotations

from pathlib import Path


def rss_mib(pid: int) -> float:
    """Read the resident memory in MiB; raises ``OSError`` if the process has ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024
