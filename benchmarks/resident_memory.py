# SPDX-License-Identifier: Apache-2.0
"""How much memory a process has in use."""

from __future__ import annotations

from pathlib import Path


def rss_mib(pid: int) -> float:
    """Resident memory in MiB; raises ``OSError`` if the process has ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024
