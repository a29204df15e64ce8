# SPDX-License-Identifier: Apache-2.0
"""A rank's progress file has one owner: the rank, whatever else has its environment."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

import muster
from muster.progress import LOOK_LINES, ProgressFile

ROOT = str(Path(muster.__file__).parents[1])
RANK = {"TORCHELASTIC_RUN_ID": "job", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "40123"}
NEXT_WORLD = {**RANK, "MASTER_PORT": "40999"}
HOROVOD = {"HOROVOD_RANK": "0"}
REPORTS = """
import sys
import muster
muster.report_step(1)
with muster.drain() as drain:
    print(drain.commit_due(2), flush=True)
sys.stdin.readline()
"""
DEADLINE_S = 240.0


@contextmanager
def another(run_dir: Path, environ: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process, a child of this one, that has reported and entered a loop, and lives."""
    process = subprocess.Popen(
        [sys.executable, "-c", REPORTS],
        env={"PYTHONPATH": ROOT, "MUSTER_RUN_DIR": str(run_dir), **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "False\n"
        yield process
    finally:
        process.communicate("\n", timeout=DEADLINE_S)


def owner(run_dir: Path) -> int:
    return int(json.loads((run_dir / "progress" / "0.json").read_bytes())["pid"])


def rank(run_dir: Path, environ: Mapping[str, str], step: int = 41) -> ProgressFile:
    """This process as a rank, at a step."""
    file = ProgressFile(str(run_dir / "progress"), environ)
    file.write(step)
    return file


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        pytest.param(RANK, RANK, id="a script that the rank starts"),
        pytest.param(RANK, {}, id="kubectl exec"),
        pytest.param({}, {}, id="without a launcher"),
    ],
)
def test_another_process_leaves_the_file_to_the_rank(
    tmp_path: Path, mine: dict[str, str], others: dict[str, str]
) -> None:
    file = rank(tmp_path, mine)
    with another(tmp_path, others) as process:
        assert owner(tmp_path) == os.getpid()
        file.write(42)
    assert process.stderr is not None
    assert owner(tmp_path) == os.getpid()


def test_it_says_once_that_it_takes_no_part(tmp_path: Path) -> None:
    rank(tmp_path, RANK)
    said = subprocess.run(
        [sys.executable, "-c", REPORTS],
        env={"PYTHONPATH": ROOT, "MUSTER_RUN_DIR": str(tmp_path), **RANK},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    ).stderr
    assert said.count("reports none and takes part in no drain") == 1
    assert f"process {os.getpid()} reports the steps of this rank" in said


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        pytest.param(RANK, NEXT_WORLD, id="the next world"),
        pytest.param({}, RANK, id="a rank after a script without a launcher"),
        pytest.param(HOROVOD, HOROVOD, id="Horovod gives a process another rank"),
    ],
)
def test_the_rank_of_another_world_takes_the_file(
    tmp_path: Path, mine: dict[str, str], others: dict[str, str]
) -> None:
    rank(tmp_path, mine)
    with another(tmp_path, others) as process:
        assert owner(tmp_path) == process.pid


def test_a_rank_that_has_ended_is_no_owner(tmp_path: Path) -> None:
    with another(tmp_path, {}) as process:
        assert owner(tmp_path) == process.pid
    with another(tmp_path, RANK) as process:
        assert owner(tmp_path) == process.pid


def test_a_rank_takes_it_from_a_script_of_its_own_that_was_first(tmp_path: Path) -> None:
    with another(tmp_path, RANK):
        rank(tmp_path, RANK)
        assert owner(tmp_path) == os.getpid()


def taken(run_dir: Path, pid: int, started: int, master: str) -> None:
    """Take the file as an older ``import muster`` does: whoever has it."""
    line = json.dumps({"pid": pid, "started": started, "master": master})
    (run_dir / "taken").write_text(line)
    (run_dir / "taken").replace(run_dir / "progress" / "0.json")


def started(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


@pytest.mark.parametrize("master", ["", "10.0.0.7:40123"])
@pytest.mark.parametrize("lives", [True, False])
def test_a_rank_whose_file_was_taken_puts_it_back(
    tmp_path: Path, master: str, lives: bool, caplog: pytest.LogCaptureFixture
) -> None:
    file = rank(tmp_path, RANK)
    with another(tmp_path, RANK) as process, caplog.at_level(logging.WARNING):
        taken(tmp_path, process.pid, started(process.pid) if lives else 1, master)
        for step in range(LOOK_LINES + 1):
            file.write(step)
        assert owner(tmp_path) == os.getpid()
        file.write(43)
    assert json.loads((tmp_path / "progress" / "0.json").read_bytes())["step"] == 43
    assert caplog.text.count("it is put back") == 1


def test_a_rank_of_a_world_that_is_over_leaves_the_file_to_the_next(tmp_path: Path) -> None:
    file = rank(tmp_path, RANK)
    with another(tmp_path, NEXT_WORLD) as process:
        for step in range(LOOK_LINES + 1):
            file.write(step)
        assert owner(tmp_path) == process.pid
