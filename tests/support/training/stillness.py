# SPDX-License-Identifier: Apache-2.0
"""For how long this machine let nobody run: such a time is not the product's.

A process of its own ticks and notes how late it comes to its turns; it does nothing else, so
whoever is late with it was kept waiting by the machine.
"""

from __future__ import annotations

import select
import subprocess
import sys
import time
from pathlib import Path

TICK_S = 0.1
LATE_S = 0.5
"""Later than this a turn comes only on a machine that stood still, not on one with much to do."""


def measure() -> None:
    """Tick until standard input ends; each line of it, two moments, is answered with the sum."""
    late: list[tuple[float, float]] = []
    while True:
        due_s = time.monotonic() + TICK_S
        asked, _, _ = select.select([sys.stdin], [], [], TICK_S)
        woke_s = time.monotonic()
        if woke_s - due_s > LATE_S:
            late.append((due_s, woke_s))
        if asked:
            line = sys.stdin.readline()
            if not line:
                return
            since_s, until_s = map(float, line.split())
            overlaps_s = (min(woke, until_s) - max(due, since_s) for due, woke in late)
            try:
                sys.stdout.write(f"{sum(max(0.0, overlap_s) for overlap_s in overlaps_s)}\n")
                sys.stdout.flush()
            except BrokenPipeError:
                return


class Stillness:
    """Measures from now on, in a process that runs ``program``, which calls ``measure``."""

    def __init__(self, program: str, *arguments: str, cwd: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def between_s(self, since_s: float, until_s: float) -> float:
        """How much of the time between two moments nobody got to run."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{since_s} {until_s}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def end(self) -> None:
        """Let the process come to its end."""
        self._process.communicate(timeout=120)
