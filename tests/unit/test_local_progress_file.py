# SPDX-License-Identifier: Apache-2.0
"""What a rank tells of itself: the file, its pace, and silence where no sidecar runs."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import muster
from muster.progress import WRITE_INTERVAL_S, ProgressFile

ROOT = Path(muster.__file__).parent


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def told(directory: Path, local_rank: int = 0) -> dict[str, object]:
    record = json.loads((directory / f"{local_rank}.json").read_text())
    assert isinstance(record, dict)
    return record


def test_the_first_step_is_told_at_once_with_who_it_is(tmp_path: Path) -> None:
    environ = {
        "LOCAL_RANK": "1",
        "RANK": "5",
        "WORLD_SIZE": "8",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    ProgressFile(str(tmp_path / "progress"), environ, Clock()).report(41)
    record = told(tmp_path / "progress", 1)
    assert isinstance(record.pop("time"), float)
    assert record == {
        "schema": 1,
        "pid": os.getpid(),
        "restart": 2,
        "rank": 5,
        "local_rank": 1,
        "world_size": 8,
        "step": 41,
    }


def test_fast_steps_are_told_together_and_the_last_one_at_the_flush(tmp_path: Path) -> None:
    clock = Clock()
    file = ProgressFile(str(tmp_path), {}, clock)
    file.report(1)
    clock.now_s += WRITE_INTERVAL_S / 2
    file.report(2)
    assert told(tmp_path)["step"] == 1
    clock.now_s += WRITE_INTERVAL_S
    file.report(3)
    assert told(tmp_path)["step"] == 3
    file.report(4)
    file.flush()
    assert told(tmp_path)["step"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["0.json"]


def test_a_directory_that_cannot_be_written_is_said_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "progress").write_text("a file where the directory should be")
    clock = Clock()
    file = ProgressFile(str(tmp_path / "progress"), {}, clock)
    for step in range(3):
        clock.now_s += 1
        file.report(step)
    assert [record.getMessage()[:26] for record in caplog.records] == ["progress is no longer told"]


@pytest.mark.parametrize("run_dir", [None, "there"])
def test_a_script_tells_its_last_step_or_nothing_without_a_run_directory(
    tmp_path: Path, run_dir: str | None
) -> None:
    environ = {"PYTHONPATH": str(ROOT.parent), "PYTHONWARNINGS": "error"}
    if run_dir:
        environ["MUSTER_RUN_DIR"] = str(tmp_path / run_dir)
    script = "import muster\nfor step in range(1, 1001): muster.report_step(step)"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environ, check=True)
    if run_dir:
        assert told(tmp_path / run_dir / "progress")["step"] == 1000
    else:
        assert list(tmp_path.iterdir()) == []


def test_training_images_need_nothing_but_python_3_8_and_its_library() -> None:
    for source in ROOT.glob("**/*.py"):
        tree = ast.parse(source.read_text(), feature_version=(3, 8))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                assert name.partition(".")[0] in {*sys.stdlib_module_names, "muster"}, source
