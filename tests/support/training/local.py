# SPDX-License-Identifier: Apache-2.0
"""One ``muster local``, and what it tells."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from console.local.processes import holding
from tests.support.training.pods import ROOT
from tests.support.waiting import DEADLINE_S, wait_until

LOSES = ("--lease-ttl", "8")
"""For a job that loses nodes: it waits for their leases."""
PACED = str(ROOT / "tests" / "support" / "scripts" / "paced_script.py")


class LocalJob:
    """One ``muster local`` and the lines that it prints; nothing of it outlives ``end``.

    ``programs``: the folder that is searched first; empty for that of this Python.
    """

    def __init__(self, directory: Path, *arguments: str, programs: str = "") -> None:
        self.name = f"job-{uuid.uuid4().hex[:8]}"
        self.report = directory / "report"
        self.logs = directory / "logs"
        self.checkpoints = directory / "checkpoints"
        self._hurry = directory / "hurry"
        self.hold = directory / "hold"
        """While it exists, as the test may have made it before, ``paced_script.py`` waits."""
        self.lines: list[str] = []
        environ = {
            **os.environ,
            "PATH": os.pathsep.join(
                [programs or str(Path(sys.executable).parent), os.environ["PATH"]]
            ),
            "CHECKPOINT_DIR": str(self.checkpoints),
            "PACED_SCRIPT_HURRY": str(self._hurry),
            "PACED_SCRIPT_HOLD": str(self.hold),
        }
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "console.main", "local"),
                *("--job", self.name, "--report", str(self.report), "--log-dir", str(self.logs)),
                # No node that stalls counts as lost. The test's arguments go before these.
                *("--lease-ttl", "30", "--grace", "90", *arguments),
            ],
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line)

    @property
    def said(self) -> str:
        """All that it has printed."""
        return "".join(self.lines)

    def told(self, words: str, timeout_s: float = 300.0) -> None:
        """Wait for a line that holds ``words``."""

        def seen() -> bool:
            return any(words in line for line in tuple(self.lines))

        self._until(seen, timeout_s, repr(words))
        assert seen(), f"it ended before it told {words!r}:\n{self.said}"

    def _until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait for a condition, or the end of the job."""
        wait_until(
            lambda: condition() or self.process.poll() is not None,
            timeout_s,
            what,
            lambda: self.said,
        )

    def worlds(self) -> list[int]:
        """Sizes of the worlds that it has told of."""
        found = (re.search(r"in a world of (\d+)", line) for line in tuple(self.lines))
        return [int(match[1]) for match in found if match is not None]

    def hurry_after(self, worlds: Sequence[int]) -> None:
        """Let ``paced_script.py`` run to its end once the last worlds told of are these."""

        def trains() -> bool:
            return self.worlds()[-len(worlds) :] == list(worlds)

        self._until(trains, 450, f"worlds {worlds}")
        assert trains(), f"it ended before worlds {worlds}:\n{self.said}"
        self._hurry.touch()

    def hurry_after_changes(self, changes: int, timeout_s: float) -> None:
        """Let ``paced_script.py`` run to its end once so many worlds have followed the first."""
        self._until(lambda: len(self.worlds()) > changes, timeout_s, f"{changes} changes")
        assert self.process.poll() is None, f"it ended before {changes} changes:\n{self.said}"
        self._hurry.touch()

    def status(self, timeout_s: float = 450.0) -> int:
        """Wait for the end."""
        status = self.process.wait(timeout_s)
        self._reader.join(DEADLINE_S)
        return status

    def leaves_nothing(self) -> None:
        """Wait until none of its processes is left."""
        wait_until(lambda: not self.processes(), 60, "no process is left behind")

    def end(self) -> None:
        """End it, if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
        self.status(60)
        self.leaves_nothing()

    def timeline(self) -> dict[str, Any]:
        """The report that it wrote."""
        report = json.loads((self.report / "timeline.json").read_text())
        assert isinstance(report, dict)
        return report

    def processes(self, *marks: str) -> set[int]:
        """Live processes of this job whose environment holds every one of ``marks``."""
        names = (f"MUSTER_JOB={self.name}", f"PET_RDZV_ID={self.name}")
        return set().union(*(holding(name, *marks) for name in names))


Start = Callable[..., LocalJob]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start jobs in the directory of the test; none outlives it."""
    jobs: list[LocalJob] = []

    def start_job(*arguments: str, programs: str = "") -> LocalJob:
        jobs.append(LocalJob(tmp_path, *arguments, programs=programs))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.end()


def sizes(timeline: dict[str, Any]) -> list[int]:
    return [world["size"] for world in timeline["worlds"]]


def moments(timeline: dict[str, Any], what: str) -> list[dict[str, Any]]:
    return [moment for moment in timeline["moments"] if moment["what"] == what]
