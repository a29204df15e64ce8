# SPDX-License-Identifier: Apache-2.0
"""The table of the fault matrix: each fault under a real job leaves a line, all are drawn anew."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from tests.support.faults.rig import Effect

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "fault-matrix.md"
MARK = "<!-- drawn by tests/support/faults/report.py -->\n"
VARIABLE = "MUSTER_TEST_FAULT_MATRIX"
"""Names the folder that takes the lines; without it nothing is kept."""

HEAD = """\
| fault | store away, s | watch gap, s | no write for, s | registered again | the job |
|---|---|---|---|---|---|
"""


def keep(number: int, fault: str, driver: str, effect: Effect, job: str) -> None:
    """Keep a line for the table. Blocks."""
    if not (folder := os.environ.get(VARIABLE)):
        return
    again = effect.registered_again
    command = ("git", "rev-parse", "--short", "HEAD")
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    cells = (
        fault if driver == "etcd" else f"{fault} ({driver})",
        f"{effect.store_gap_s:.1f}",
        f"{effect.watch_gap_s:.1f}",
        f"{effect.write_outage_s:.1f}",
        f"{again} of 3" if again else "none",
        f"{job} **wrong**" if effect.wrong else job,
    )
    path = Path(folder) / f"{driver}-{number:02}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"| {' | '.join(cells)} |\n{commit.strip() or 'unknown'}\n")


def draw() -> None:
    """Replace the table at the end of the document, if lines are kept at all. Blocks."""
    folder = os.environ.get(VARIABLE)
    if folder and (paths := sorted(Path(folder).glob("*.md"))):
        lines = [path.read_text().splitlines() for path in paths]
        commits = ", ".join(sorted({commit for _, commit in lines}))
        before, mark, _ = DOCUMENT.read_text().partition(MARK)
        machine = f"{os.cpu_count()} cores, Linux {platform.release()}"
        python = platform.python_version()
        made = f"{datetime.now(UTC).date()}, {commits}, {machine}, Python {python}."
        table = HEAD + "".join(f"{line}\n" for line, _ in lines)
        DOCUMENT.write_text(f"{before}{mark}\n{made}\n\n{table}")
