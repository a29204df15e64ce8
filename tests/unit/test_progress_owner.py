# SPDX-License-Identifier: Apache-2.0
"""What a rank tells of itself: the progress file, its pace, its one owner, and silence."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import muster
import muster.progress
from agent.rundir.reports import is_gone, read_line, read_lines, read_ranks
from launcher_shim.rundir.rank_reports import is_whole
from muster.progress import BLOCK_BYTES, LOOK_LINES, ProgressFile
from rdzv.records.progress import RankProgress
from tests.support.sidecars.pod_gate import forget_sidecar

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
    ("mine", "others", "stays"),
    [
        pytest.param(RANK, RANK, True, id="a script that the rank starts"),
        pytest.param(RANK, {}, True, id="kubectl exec"),
        pytest.param({}, {}, True, id="without a launcher"),
        pytest.param(RANK, NEXT_WORLD, False, id="the next world"),
        pytest.param({}, RANK, False, id="a rank after a script without a launcher"),
        pytest.param(HOROVOD, HOROVOD, False, id="Horovod gives a process another rank"),
    ],
)
def test_another_process_takes_the_file_as_the_rank_of_another_world_alone(
    tmp_path: Path, mine: dict[str, str], others: dict[str, str], stays: bool
) -> None:
    file = rank(tmp_path, mine)
    with another(tmp_path, others) as process:
        assert owner(tmp_path) == (os.getpid() if stays else process.pid)
        if stays:
            file.write(42)
    assert owner(tmp_path) == (os.getpid() if stays else process.pid)


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


def told(directory: Path, local_rank: int = 0) -> dict[str, object]:
    record = json.loads((directory / f"{local_rank}.json").read_text())
    assert isinstance(record, dict)
    return record


def test_the_first_step_is_told_at_once_with_who_it_is(tmp_path: Path) -> None:
    environ = {
        "LOCAL_RANK": "1",
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "40123",
    }
    ProgressFile(str(tmp_path / "progress"), environ).write(41)
    record = told(tmp_path / "progress", 1)
    assert isinstance(record.pop("time"), float)
    assert isinstance(record.pop("crc"), str)
    assert record == {
        "schema": 1,
        "pid": os.getpid(),
        "started": started(os.getpid()),
        "restart": 2,
        "rank": 5,
        "local_rank": 1,
        "world_size": 8,
        "local_world_size": 2,
        "master": "10.0.0.7:40123",
        "first": 41,
        "step": 41,
        "drain": False,
        "held": False,
        "epoch": 0,
        "acked": None,
        "failed": None,
    }


def test_the_line_is_overwritten_where_it_is(tmp_path: Path) -> None:
    file, path = ProgressFile(str(tmp_path), {}), tmp_path / "0.json"
    file.write(1)
    inode = path.stat().st_ino
    for step in (10**18, 3):
        file.write(step, True, True, 7, (7, step), (6, "x" * 1000))
        assert path.stat().st_ino == inode
        assert path.stat().st_size == 2 * BLOCK_BYTES
    assert [entry.name for entry in tmp_path.iterdir()] == ["0.json"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    again = ProgressFile(str(tmp_path), {})
    again.write(4)
    assert path.stat().st_ino != inode, "the file of another process is never written into"


def test_what_is_told_is_read(tmp_path: Path) -> None:
    file = ProgressFile(str(tmp_path), {"TORCHELASTIC_RUN_ID": "j", "MASTER_ADDR": "h" * 253})
    file.write(3, True, True, 7, (6, 2), (7, 'no "space"\non\\ devicé'))
    (line,) = read_lines(tmp_path)
    assert line.master == "h" * 253 + ":"
    assert (line.step, line.drain, line.held, line.epoch) == (3, True, True, 7)
    assert line.acked == (6, 2)
    assert line.failed == (7, "no 'space' on? devic?")
    assert (tmp_path / "0.json").stat().st_size == 3 * BLOCK_BYTES


@given(data=st.data())
def test_a_line_that_is_half_of_two_writes_is_known_as_that(data: st.DataObject) -> None:
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        file = ProgressFile(directory, {})
        for _ in range(2):
            file.write(
                data.draw(st.integers(0, 10**9)), *data.draw(st.tuples(*[st.booleans()] * 2))
            )
            lines.append(Path(directory, "0.json").read_bytes())
    cut = data.draw(st.integers(0, 2 * BLOCK_BYTES))
    torn = lines[0][:cut] + lines[1][cut:]
    assert is_whole(torn) == (torn in lines)


def test_a_reader_that_always_meets_half_a_line_gives_up(tmp_path: Path) -> None:
    path = tmp_path / "0.json"
    ProgressFile(str(tmp_path), {}).write(41)
    assert read_line(path) is not None
    path.write_bytes(path.read_bytes().replace(b'"step":41', b'"step":42'))
    assert read_line(path) is None


@given(st.binary(max_size=600))
def test_no_bytes_harm_the_reader(content: bytes) -> None:
    summed = b'{"crc":"%08x"%b' % (zlib.crc32(content + b"\n"), content + b"\n")
    with tempfile.TemporaryDirectory() as directory:
        for bytes_ in (content, summed):
            Path(directory, "0.json").write_bytes(bytes_)
            assert read_lines(Path(directory)) == ()


@pytest.mark.parametrize("told", ["1e999", "[1,2,3]", "[]", '"x"', "null", "{}", '[1e999,"x"]'])
@pytest.mark.parametrize("name", ["step", "time", "acked", "failed", "pid"])
def test_no_value_harms_the_reader(tmp_path: Path, name: str, told: str) -> None:
    ProgressFile(str(tmp_path), {}).write(1)
    fields = json.loads((tmp_path / "0.json").read_text())
    del fields["crc"]
    inner = json.dumps({**fields, name: "HERE"}).replace('"HERE"', told)[1:].encode() + b"\n"
    (tmp_path / "0.json").write_bytes(b'{"crc":"%08x",%b' % (zlib.crc32(b"," + inner), inner))
    for line in read_lines(tmp_path):
        assert line.step == 1, "only null, which is a value of acked and failed"
        assert told == "null"


def test_a_process_that_is_gone_is_told_by_number_and_start(tmp_path: Path) -> None:
    ProgressFile(str(tmp_path), {}).write(1)
    line = read_line(tmp_path / "0.json")
    assert line is not None
    assert not is_gone(line)
    assert is_gone(replace(line, started=line.started + 1))
    with subprocess.Popen(["/bin/true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie until the block ends
        zombie = replace(line, pid=ended.pid, started=started(ended.pid))
        assert is_gone(zombie)
    assert is_gone(zombie)


def test_a_rank_that_has_ended_is_still_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 2**22 + 1)
        ProgressFile(str(tmp_path), {"LOCAL_WORLD_SIZE": "2"}).write(3, True)
    assert read_ranks(tmp_path) == (RankProgress(0, 2, "", 3, drain=True, held=False),)


def test_a_directory_that_cannot_be_written_is_said_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "progress").write_text("a file where the directory should be")
    monkeypatch.setenv("MUSTER_RUN_DIR", str(tmp_path))
    forget_sidecar(monkeypatch)
    for step in range(3):
        muster.report_step(step)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "progress is no longer written"
    ]


def test_a_script_tells_its_last_step(tmp_path: Path) -> None:
    environ = {"PYTHONPATH": ROOT, "MUSTER_RUN_DIR": str(tmp_path), "PYTHONWARNINGS": "error"}
    script = "import muster\nfor step in range(1, 1001): muster.report_step(step)"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environ, check=True)
    assert told(tmp_path / "progress")["step"] == 1000
