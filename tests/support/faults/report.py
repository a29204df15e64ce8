# SPDX-License-Identifier: Apache-2.0
"""The table of the fault matrix: one line a fault and driver, kept as JSON until it is drawn."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.support.faults.rig import Effect

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "fault-matrix.md"
MARK = "<!-- drawn by tests/support/faults/report.py -->\n"
VARIABLE = "MUSTER_TEST_FAULT_MATRIX"
"""Names the folder that takes the lines; without it nothing is kept."""


@dataclass(frozen=True)
class Line:
    """One fault under one driver."""

    number: int
    fault: str
    driver: str
    store_gap_s: float
    watch_gap_s: float
    write_outage_s: float
    events: int
    lost: int
    doubled: int
    out_of_order: int
    leases: str
    job: str
    operations: int
    wrong: tuple[str, ...]
    load: float
    date: str
    commit: str


def keep(number: int, fault: str, driver: str, effect: Effect, job: str) -> None:
    """Keep a line for the table. Blocks."""
    folder = os.environ.get(VARIABLE)
    if folder:
        path = Path(folder) / f"{driver}-{number:02}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(_line(number, fault, driver, effect, job))))


def _line(number: int, fault: str, driver: str, effect: Effect, job: str) -> Line:
    again = effect.registered_again
    return Line(
        number,
        fault,
        driver,
        effect.store_gap_s,
        effect.watch_gap_s,
        effect.write_outage_s,
        effect.events,
        effect.lost,
        effect.doubled,
        effect.out_of_order,
        f"{again} of 3 registered again" if again else "kept",
        job,
        effect.operations,
        effect.wrong,
        os.getloadavg()[0],
        datetime.now(UTC).date().isoformat(),
        _commit(),
    )


def draw(folder: Path) -> str:
    """Draw the table of all lines that were kept."""
    lines = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    rows = [
        "| driver | fault | store away | watch gap | no write for | lost, doubled, out of order"
        " | leases | the job | checked | load | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in sorted(lines, key=lambda one: (one["driver"], one["number"])):
        counts = f"{one['lost']}, {one['doubled']}, {one['out_of_order']} of {one['events']}"
        checked = f"{one['operations']} operations" + (" **wrong**" if one["wrong"] else "")
        cells = [
            one["driver"],
            one["fault"],
            _seconds(one.get("store_gap_s")),
            _seconds(one["watch_gap_s"]),
            _seconds(one["write_outage_s"]),
            counts,
            one["leases"],
            one["job"],
            checked,
            f"{one['load']:.0f}" if "load" in one else "–",
            one["commit"],
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def machine() -> str:
    """What this machine is."""
    cores = os.cpu_count()
    return f"{cores} cores, Linux {platform.release()}, Python {platform.python_version()}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


def _commit() -> str:
    command: Sequence[str] = ("git", "rev-parse", "--short", "HEAD")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def draw_into(document: Path) -> None:
    """Replace the table at the end of ``document``, if lines are kept at all. Blocks."""
    folder = os.environ.get(VARIABLE)
    if folder and any(Path(folder).glob("*.json")):
        before, mark, _ = document.read_text().partition(MARK)
        today = datetime.now(UTC).date().isoformat()
        table = draw(Path(folder))
        document.write_text(f"{before}{mark}\n{today}, {machine()}.\n\n{table}\n")


if __name__ == "__main__":
    draw_into(DOCUMENT)
