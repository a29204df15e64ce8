# SPDX-License-Identifier: Apache-2.0
"""``muster local -- horovodrun …`` with the real horovodrun: what it shows, and how it ends."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.horovod.cluster import horovod_folder
from tests.support.training.local import PACED, LocalJob, Start, moments, sizes
from tests.support.training.pods import ROOT
from tests.support.waiting import wait_until

DIGITS = str(ROOT / "examples" / "horovod_digits.py")

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def start(start: Start) -> Start:
    def start_job(*arguments: str, script: tuple[str, ...], programs: str = "") -> LocalJob:
        patience, folder = ("--gloo-timeout-seconds", "120"), horovod_folder()
        launcher = (f"{folder}/horovodrun", *patience, f"{folder}/python", *script)
        return start(*arguments, "--", *launcher, programs=programs)

    return start_job


def every_step(timeline: dict[str, Any]) -> list[int]:
    return [step for world in timeline["worlds"] for _, step in world["points"]]


def command_lines() -> bytes:
    lines = b""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                lines += (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return lines


def test_a_drain_of_rank_0_loses_no_step_and_shows_no_secret(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKING_TOKEN", "not-for-command-lines")
    (tmp_path / "hold").touch()  # both workers are seen before one is drained
    job = start(
        *("--nodes", "2", "--event", "drain:rank0@world2+1s"),
        script=(PACED, DIGITS, "--epochs", "40", "--step-ms", "150"),
    )
    marks = ("HOROVOD_LOCAL_RANK=0", "TRACKING_TOKEN=not-for-command-lines")
    wait_until(lambda: len(job.processes(*marks)) >= 2, 300, "two workers", lambda: job.said)
    assert b"not-for-command-lines" not in command_lines()
    job.hold.unlink()
    job.told("in a world of 2")
    assert b"not-for-command-lines" not in command_lines()
    job.hurry_after([2, 1])
    assert job.status() == 0, job.said
    timeline = job.timeline()
    assert sizes(timeline) == [2, 1], job.said
    assert all(before < after for before, after in pairwise(every_step(timeline)))
    (drained,) = moments(timeline, "drained")
    assert drained["who"] == moments(timeline, "drain")[0]["who"]
    assert "test accuracy" in job.said
    assert (job.report / "world.svg").read_text().startswith("<svg")


@pytest.mark.long
def test_workers_of_a_join_start_warm(start: Start, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    job = start(
        *("--warm", "--nodes", "1", "--max", "2", "--log-dir", str(logs)),
        *("--event", "add@world1+1s"),
        script=(PACED, DIGITS, "--epochs", "40", "--step-ms", "150"),
        programs=horovod_folder(),
    )
    job.told("in a world of 2")
    assert command_lines().count(b"muster-zygote") == 2
    job.hurry_after([1, 2])
    assert job.status() == 0, job.said
    assert sizes(job.timeline()) == [1, 2], job.said
    said = [path.read_text() for path in logs.glob("*/*.log")]
    assert said
    assert not [text for text in said if "without the zygote" in text or "without a zygote" in text]


@pytest.mark.long
def test_killed_from_outside_it_leaves_no_process_behind(start: Start) -> None:
    job = start("--nodes", "2", script=(DIGITS,))
    job.told("first step")
    job.process.kill()
    assert job.status(120) == -9
    job.leaves_nothing()


@pytest.mark.long
def test_a_script_that_fails_ends_the_job_with_horovodruns_status(
    start: Start, tmp_path: Path
) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit('this script cannot train')\n")
    job = start("--nodes", "2", script=(str(script),))
    assert job.status() == 1, job.said
    assert "this script cannot train" in job.said
