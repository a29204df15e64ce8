# SPDX-License-Identifier: Apache-2.0
"""What is read of a launcher's command line, and how the sidecar reads what is told of it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import stat
from pathlib import Path
from typing import Any

import pytest

from agent.rundir.reports import LaunchReport
from agent.rundir.reports import read_launch as read_report
from launcher_shim.pod import launch
from launcher_shim.pod.launch import REPORT_MAX_BYTES, Reporter, read_launch
from launcher_shim.pod.launch import Launch as Report
from launcher_shim.pod.run import _on_reporting_ended, _poll
from launcher_shim.rundir import layout

DELIVERED = {
    "PET_NNODES": "2:4",
    "PET_RDZV_ENDPOINT": "localhost:29400",
    "PET_RDZV_ID": "digits",
    "PET_RDZV_BACKEND": "c10d",
    "SECRET": "hunter2",
}
KEPT = {**DELIVERED, "MUSTER_KEEP_FLAGS": "1"}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("torchrun train.py", {}),
        ("/usr/bin/python3 -u /usr/local/bin/torchrun train.py", {}),
        ("nice python -m torch.distributed.run --nproc-per-node=2 train.py", {}),
        ("numactl -N 0 -m 0 torchrun --standalone train.py", {"standalone": "1"}),
        ("python -u -X faulthandler -m torch.distributed.run train.py", {}),
        ("torchrun --rdzv-endpoint=localhost:1 train.py", {"rdzv-endpoint": "localhost:1"}),
        ("torchrun --rdzv_endpoint localhost:1 train.py", {"rdzv-endpoint": "localhost:1"}),
        ("torchrun --nnodes 1:8 --rdzv-id x t.py", {"nnodes": "1:8"}),
        ("torchrun --standalone --nproc-per-node 2 train.py", {"standalone": "1"}),
        # What comes after the script is the script's own.
        ("torchrun --nproc-per-node 2 train.py --nnodes=9 --standalone", {}),
        ("torchrun -m train --nnodes=9", {}),
        ("torchrun -t 3 --nnodes=5 -- train.py --nnodes=9", {"nnodes": "5"}),
    ],
)
def test_options_win_over_variables_if_they_are_kept(line: str, told: dict[str, str]) -> None:
    launch = read_launch(5, shlex.split(line), KEPT)
    assert launch is not None
    assert launch.launcher == "torchrun"
    expected = {"nnodes": "2:4", "rdzv-endpoint": "localhost:29400", "rdzv-backend": "c10d"}
    assert dict(launch.options) == {**expected, **told}
    assert b"hunter2" not in launch.to_json("a")
    overruled = read_launch(5, shlex.split(line), DELIVERED)
    assert overruled is not None
    assert dict(overruled.options) == expected
    nested = read_launch(5, shlex.split(line), {**DELIVERED, "TORCHELASTIC_RUN_ID": "digits"})
    assert nested == launch


@pytest.mark.parametrize(
    "line",
    [
        "python /opt/bin/accelerate launch --multi_gpu --rdzv_backend static train.py",
        "accelerate-launch train.py",
        "python -m accelerate.commands.launch train.py",
    ],
)
def test_accelerates_launcher_is_a_torchrun_where_it_becomes_one(line: str) -> None:
    launch = read_launch(5, line.split(), DELIVERED)
    assert launch is not None
    assert (launch.launcher, launch.options["rdzv-backend"]) == ("torchrun", "c10d")
    assert read_launch(5, line.split(), KEPT) is None


@pytest.mark.parametrize(
    "line",
    [
        "python train.py",
        "sh -c 'torchrun train.py'",
        "sleep torchrunner",
        "accelerate config",
        "",
        # What a script is given is the script's own.
        "python train.py --launcher torchrun",
        "sh start.sh torchrun train.py",
        f"env {'X=1 ' * 32} torchrun",
    ],
)
def test_any_other_process_is_none(line: str) -> None:
    assert read_launch(5, shlex.split(line), DELIVERED) is None


def test_horovodrun_is_told_by_its_name_alone() -> None:
    launch = read_launch(5, ["horovodrun", "-np", "2", "--token", "hunter2"], DELIVERED)
    assert launch is not None
    assert (launch.launcher, dict(launch.options)) == ("horovodrun", {})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where a report goes that a sidecar has asked for."""
    (tmp_path / layout.LAUNCH).mkdir()
    return tmp_path / layout.LAUNCH / layout.LAUNCHER


def told(place: Path, content: bytes) -> LaunchReport | None:
    place.write_bytes(content)
    return read_report(place.parent.parent)


def test_the_sidecar_reads_what_was_written(place: Path) -> None:
    launch = read_launch(5, ["torchrun", "--standalone", "train.py"], KEPT)
    assert launch is not None
    assert told(place, launch.to_json("a")) == LaunchReport(
        "a", "torchrun", 5, "2:4", "localhost:29400", "c10d", standalone=True
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"schema":1}',
        b'{"schema":1,"started":1,"launcher":"torchrun","pid":5}',
        b'{"schema":2,"started":"a","launcher":"torchrun","pid":5}',
        b"[" * REPORT_MAX_BYTES,
    ],
)
def test_what_is_no_report_tells_nothing(place: Path, content: bytes) -> None:
    assert told(place, content) is None


def test_what_is_told_cannot_forge_a_line_of_the_log(place: Path) -> None:
    fields = {"schema": 1, "started": "a", "launcher": "torchrun", "pid": 5}
    forged = {**fields, "nnodes": "1\n2\x1b[2J", "rdzv_backend": 7}
    launch = told(place, json.dumps(forged).encode())
    assert launch is not None
    assert launch.nnodes == "1?2?[2J"
    assert launch.rdzv_backend == ""


def test_a_pipe_or_a_link_in_its_place_holds_nobody_up(tmp_path: Path, place: Path) -> None:
    os.mkfifo(place)
    assert read_report(tmp_path) is None
    place.unlink()
    place.symlink_to("/etc/hostname")
    assert read_report(tmp_path) is None


def test_a_pipe_beside_the_report_holds_nobody_up(tmp_path: Path, place: Path) -> None:
    os.mkfifo(place.with_name(f"{layout.LAUNCHER}.{os.getpid()}"))
    assert not Reporter(str(tmp_path)).report(Report("torchrun", 7))
    assert read_report(tmp_path) is None


def test_the_sidecars_user_may_read_it_whatever_the_umask_is(tmp_path: Path, place: Path) -> None:
    reporter = Reporter(str(tmp_path))
    before = os.umask(0o077)
    try:
        assert reporter.report(Report("torchrun", 7))
        assert reporter.report(Report("torchrun", 8))
    finally:
        os.umask(before)
    assert stat.S_IMODE(place.stat().st_mode) == 0o644
    assert list(place.parent.iterdir()) == [place]
    launch = read_report(tmp_path)
    assert launch is not None
    assert launch.pid == 8


def test_a_report_is_taken_back_but_no_other_ones(tmp_path: Path, place: Path) -> None:
    before, after = Reporter(str(tmp_path)), Reporter(str(tmp_path))
    before.withdraw()
    assert before.report(Report("torchrun", 7))
    assert after.report(Report("torchrun", 8))
    before.withdraw()
    assert place.exists()
    after.withdraw()
    assert not place.exists()


def test_what_is_no_report_is_not_taken_back(tmp_path: Path, place: Path) -> None:
    for content in (b"{", b"[]", b"\xff", b"[" * REPORT_MAX_BYTES):
        place.write_bytes(content)
        Reporter(str(tmp_path)).withdraw()
        assert place.read_bytes() == content


def test_a_sidecar_that_asks_for_no_report_gets_none(tmp_path: Path) -> None:
    assert not Reporter(str(tmp_path)).report(Report("torchrun", 7))
    assert list(tmp_path.iterdir()) == []


def test_processes_that_proc_hides_are_not_below_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hidden(path: str, mode: str) -> Any:
        if path == "/proc/1/stat":
            raise PermissionError(1, "Operation not permitted", path)
        return open(path, mode)

    monkeypatch.setattr(launch, "open", hidden, raising=False)
    assert os.getpid() in launch.descendants(os.getppid())


async def test_a_report_that_cannot_go_on_is_said_and_no_more(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def look(_: object) -> Report:
        raise PermissionError(13, "Permission denied", "/proc")

    monkeypatch.setattr(launch, "look", look)
    reporting = asyncio.ensure_future(_poll(Reporter(str(tmp_path)).look))
    reporting.add_done_callback(_on_reporting_ended)
    with caplog.at_level(logging.ERROR):
        await asyncio.wait([reporting])
    assert [record.message for record in caplog.records] == [
        "the launcher is not reported to the sidecar any more"
    ]
