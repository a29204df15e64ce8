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
| driver | fault | store away | watch gap | no write for | lost, doubled, out of order | leases \
| the job | checked | load | commit |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def keep(number: int, fault: str, driver: str, effect: Effect, job: str) -> None:
    """Keep a line for the table. Blocks."""
    if not (folder := os.environ.get(VARIABLE)):
        return
    again = effect.registered_again
    command = ("git", "rev-parse", "--short", "HEAD")
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    cells = (
        driver,
        fault,
        f"{effect.store_gap_s:.1f} s",
        f"{effect.watch_gap_s:.1f} s",
        f"{effect.write_outage_s:.1f} s",
        f"{effect.lost}, {effect.doubled}, {effect.out_of_order} of {effect.events}",
        f"{again} of 3 registered again" if again else "kept",
        job,
        f"{effect.operations} operations" + (" **wrong**" if effect.wrong else ""),
        f"{os.getloadavg()[0]:.0f}",
        commit.strip() or "unknown",
    )
    path = Path(folder) / f"{driver}-{number:02}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"| {' | '.join(cells)} |\n")


def draw() -> None:
    """Replace the table at the end of the document, if lines are kept at all. Blocks."""
    folder = os.environ.get(VARIABLE)
    if folder and (lines := sorted(Path(folder).glob("*.md"))):
        before, mark, _ = DOCUMENT.read_text().partition(MARK)
        machine = f"{os.cpu_count()} cores, Linux {platform.release()}"
        made = f"{datetime.now(UTC).date()}, {machine}, Python {platform.python_version()}."
        table = HEAD + "".join(path.read_text() for path in lines)
        DOCUMENT.write_text(f"{before}{mark}\n{made}\n\n{table}")
