# SPDX-License-Identifier: Apache-2.0
"""Runs every drill with Muster and without, and writes what came of it as a Markdown table.

    scripts/drill-table --slots 1 --slots 2 docs/kubernetes-drills.md

A cluster that is not there is made, and ended afterwards. Rows are kept beside the page
as they come (``.json``), so that a run that was ended goes on with what is missing; ``--again``
begins anew.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sidecar_image.image import sidecar_archive
from tests.support.cluster.claim import claimed
from tests.support.cluster.drills import DRILLS, Drill, Row, run, series
from tests.support.cluster.lab import ROOT, Kubelab

Told = dict[str, str]
OUTCOME = ("lost", "twice", "still")


@dataclass
class Rows:
    """The rows measured so far, in a file that is written after each new one."""

    kept: Path
    found: list[Told] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.kept.exists():
            self.found = json.loads(self.kept.read_text())

    def missing(self, slots: Sequence[int]) -> Iterator[tuple[int, bool, list[Drill]]]:
        """Yield the missing drills by series: processes per pod, whether with Muster, the drills.

        Jobs with Muster come first: without it, a job may take 90 s per drill to stand still.
        """
        for muster in (True, False):
            for size in slots:
                for drills in series([drill for drill in DRILLS if muster or drill.native]):
                    have = {(row["drill"], row["slots"], row["with"]) for row in self.found}
                    left = [d for d in drills if (d.name, str(size), _word(muster)) not in have]
                    if left:
                        yield size, muster, left

    def make(self, lab: Kubelab, slots: int, muster: bool, drills: Sequence[Drill]) -> None:
        """Run the drills of one series, and store their rows."""
        directory = Path(tempfile.mkdtemp(prefix="kube-drills-"))
        for row in run(lab, directory, drills, slots=slots, muster=muster):
            self.found.append(told(row))
            self.kept.write_text(json.dumps(self.found, indent=1))
            print(directory, self.found[-1], flush=True)  # noqa: T201


def _word(muster: bool) -> str:
    return "Muster" if muster else "torchrun alone"


def _commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def told(row: Row) -> Told:
    """Convert a row to texts."""
    work, account = row.workload, row.account
    return {
        "drill": row.drill.name,
        "slots": str(work.slots),
        "with": _word(row.muster),
        "pods": f"{work.replicas} × {work.slots}",
        "grace": f"{work.grace_s} s",
        "enough": f"{work.enough_s:.1f} s",
        "lost": str(account.lost),
        "twice": str(account.twice),
        "still": f"{account.still_s:.0f} s",
        "goes on": "yes" if account.went_on else "no",
        "commit": _commit(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def not_run(found: Sequence[Told]) -> str:
    """Return a sentence with the pod sizes that have rows with Muster only; empty if none has."""
    run, native = (
        {row["slots"] for row in found if row["with"] == _word(muster)} for muster in (True, False)
    )
    missing = sorted(run - native)
    if not missing:
        return ""
    return f"Not run without Muster: jobs with {' or '.join(missing)} processes in a pod.\n\n"


def _outcome(row: Told | None) -> str:
    if row is None:
        return ""
    return ", ".join([*(row[name] for name in OUTCOME), *["stops"] * (row["goes on"] == "no")])


def _given(row: Told) -> str:
    return f"{row['pods']} pods, grace {row['grace']}, enough {row['enough']}"


def table(found: Sequence[Told], usual: str) -> str:
    """Render a line for each drill and pod size, with Muster beside torchrun alone."""
    drills: dict[str, dict[str, Told]] = {}
    for row in found:
        given = _given(row)
        name = row["drill"] if given == usual else f"{row['drill']} ({given})"
        drills.setdefault(name, {})[row["with"]] = row
    sides = [_word(True), _word(False)]
    outcome = ", ".join(OUTCOME)
    heads = ["what happens", *(f"{side}: {outcome}" for side in sides)]
    lines = [heads, ["---"] * len(heads)]
    for name, rows in drills.items():
        lines.append([name, *(_outcome(rows.get(side)) for side in sides)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(found: Sequence[Told]) -> str:
    """Render the page."""
    today = datetime.datetime.now(datetime.UTC).date()
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = f"{os.cpu_count()} cores, {memory_gib:.0f} GiB, {platform.machine()}"
    order = [drill.name for drill in DRILLS]
    found = sorted(found, key=lambda r: (r["slots"], order.index(r["drill"]), r["with"]))
    usual = Counter(map(_given, found)).most_common(1)[0][0]
    loads = [float(row["load"]) for row in found]
    text = (Path(__file__).parent / "page.md").read_text()
    return text.format(
        not_run=not_run(found),
        date=today,
        machine=machine,
        commits=", ".join(sorted({row["commit"] for row in found})),
        loads=f"{min(loads):.0f} to {max(loads):.0f}",
        usual=usual,
        table=table(found, usual),
    )


def main() -> None:
    """Run the missing drills, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--slots", type=int, action="append", required=True)
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    kept = arguments.page.with_suffix(".json")
    if arguments.again:
        kept.unlink(missing_ok=True)
    lab = Kubelab()
    rows = Rows(kept)
    with claimed(lab):
        lab.command("up", timeout_s=900)
        lab.command("load", str(sidecar_archive()), timeout_s=300)
        for slots, muster, drills in rows.missing(arguments.slots):
            rows.make(lab, slots, muster, drills)
    arguments.page.write_text(page(rows.found))


if __name__ == "__main__":
    main()
