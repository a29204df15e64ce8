# SPDX-License-Identifier: Apache-2.0
"""What a sidecar that starts again writes into the run directory, and what is there already."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.rundir.files import LIBRARY, RunDir, State
from launcher_shim.rundir import layout
from muster.progress import ProgressFile
from rdzv.errors import ConfigError
from tests.support.sources import ROOT


def test_every_package_of_the_library_is_delivered() -> None:
    found = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "muster").rglob("*.py")}
    assert {*LIBRARY} == found


def test_a_file_that_is_as_it_is_to_be_is_left_alone(tmp_path: Path) -> None:
    run_dir, path = RunDir(str(tmp_path)), tmp_path / layout.STATE
    run_dir.keep(State("a"))
    before = path.stat().st_ino
    run_dir.keep(State("a"))
    assert path.stat().st_ino == before
    run_dir.keep(State("b"))
    assert State.from_json(layout.STATE, path.read_bytes()) == State("b")


def owned_by_another(path: Path) -> None:
    os.chown(path, os.geteuid() + 1, -1)


def linked_elsewhere(path: Path) -> None:
    path.with_name("mine").hardlink_to(path)


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


@pytest.mark.parametrize(
    "done",
    [
        pytest.param(
            owned_by_another,
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away"),
        ),
        linked_elsewhere,
        open_to_all,
    ],
)
def test_a_file_that_others_could_change_is_made_anew(
    tmp_path: Path, done: Callable[[Path], None]
) -> None:
    run_dir, path = RunDir(str(tmp_path)), tmp_path / layout.STATE
    run_dir.keep(State("a"))
    done(path)
    before = path.stat().st_ino
    run_dir.keep(State("a"))
    now = path.stat()
    assert now.st_ino != before
    assert (now.st_uid, now.st_nlink, now.st_mode & 0o777) == (os.geteuid(), 1, 0o644)
    assert State.from_json(layout.STATE, path.read_bytes()) == State("a")


def test_a_volume_that_runs_no_programs_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount may need root, which this test does without."""
    real = os.statvfs

    def noexec(path: Path) -> os.statvfs_result:
        fields = list(real(path))
        fields[8] |= os.ST_NOEXEC
        return os.statvfs_result(fields)

    RunDir(str(tmp_path)).make()
    monkeypatch.setattr(os, "statvfs", noexec)
    with pytest.raises(ConfigError) as refused:
        RunDir(str(tmp_path)).make()
    said = str(refused.value)
    assert said.startswith(f"--run-dir (MUSTER_RUN_DIR): {tmp_path} is on a volume")
    assert "noexec" in said
    assert "emptyDir" in said
    assert "\n" not in said


def test_i8_what_else_lies_in_the_run_directory_stops_nothing(tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    ProgressFile(str(progress), {"LOCAL_RANK": "1"}).write(7)
    os.mkfifo(progress / "7.json")
    (progress / "8.json").symlink_to("/dev/zero")
    (progress / "9.json").mkdir()
    (progress / "10.json").write_bytes(b"\x00" * 10_000)
    (tmp_path / "workers").symlink_to(tmp_path / "workers")
    run_dir = RunDir(str(tmp_path))
    assert [(rank.local_rank, rank.step) for rank in run_dir.ranks()] == [(1, 7)]
    assert run_dir.commands() is None
