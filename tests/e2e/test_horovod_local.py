# SPDX-License-Identifier: Apache-2.0
"""``muster local -- horovodrun …`` with the real horovodrun: what it shows, and how it ends."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.horovod.rig import horovod_folder
from tests.support.training.local import PACED, ROOT, LocalJob, moments, sizes

DIGITS = str(ROOT / "examples" / "horovod_digits.py")

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="session")
def folder() -> str:
    return horovod_folder()


@pytest.fixture
def start(tmp_path: Path, folder: str) -> Iterator[Callable[..., LocalJob]]:
    jobs: list[LocalJob] = []

    def start_job(*arguments: str, script: tuple[str, ...]) -> LocalJob:
        patience = ("--gloo-timeout-seconds", "120")
        launcher = (f"{folder}/horovodrun", *patience, f"{folder}/python", *script)
        jobs.append(LocalJob(tmp_path, *arguments, "--", *launcher))
        return jobs[-1]

    yield start_job
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
        job.status(60)
        job.leaves_nothing(60)


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


def test_a_join_and_a_drain_of_rank_0_lose_no_step_and_show_no_secret(
    start: Callable[..., LocalJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKING_TOKEN", "not-for-command-lines")
    job = start(
        *("--nodes", "2", "--max", "3", "--event", "add@world2+3s"),
        *("--event", "drain:rank0@world3+5s"),
        script=(PACED, DIGITS, "--epochs", "50", "--step-ms", "150"),
    )
    job.told("first step")
    workers = job.processes("HOROVOD_LOCAL_RANK=0", "TRACKING_TOKEN=not-for-command-lines")
    assert len(workers) >= 2
    assert b"not-for-command-lines" not in command_lines()
    job.hurry_after([2, 3, 2])
    assert job.status(450) == 0, "".join(job.lines)
    timeline = job.timeline()
    assert sizes(timeline) == [2, 3, 2], "".join(job.lines)
    assert all(before < after for before, after in pairwise(every_step(timeline)))
    (drained,) = moments(timeline, "drained")
    assert drained["who"] == moments(timeline, "drain")[0]["who"]
    assert any("test accuracy" in line for line in job.lines), "".join(job.lines)
    assert (job.report / "world.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.long),
        (signal.SIGTERM, 143),
        (signal.SIGKILL, -9),
    ],
)
def test_ended_from_outside_it_leaves_no_process_behind(
    start: Callable[..., LocalJob], number: signal.Signals, status: int
) -> None:
    job = start("--nodes", "2", script=(DIGITS,))
    job.told("first step")
    job.process.send_signal(number)
    assert job.status(120) == status
    job.leaves_nothing(60)


def test_a_launcher_node_that_is_killed_ends_the_job_and_every_worker(
    start: Callable[..., LocalJob],
) -> None:
    job = start("--nodes", "2", "--event", "kill:launcher@world2+5s", script=(DIGITS,))
    assert job.status(400) == 137, "".join(job.lines)
    job.leaves_nothing(60)


@pytest.mark.long
def test_a_script_that_fails_ends_the_job_with_horovodruns_status(
    start: Callable[..., LocalJob], tmp_path: Path
) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit('this script cannot train')\n")
    job = start("--nodes", "2", script=(str(script),))
    assert job.status(400) == 1, "".join(job.lines)
    assert any("this script cannot train" in line for line in job.lines), "".join(job.lines)
