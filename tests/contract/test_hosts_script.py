# SPDX-License-Identifier: Apache-2.0
"""``discover_hosts.sh`` under the shells that images have."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.waiting import DEADLINE_S

SCRIPT = Path(__file__).parents[2] / "launcher_shim" / "pod" / "discover_hosts.sh"
SHELLS = [shell for shell in ("dash", "bash", "busybox") if shutil.which(shell)]

LIST = "node-0.0a1b2c3d:2\nnode-1.99999999:1\nrev-12:0\n"


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> list[str]:
    name: str = request.param
    return ["busybox", "sh"] if name == "busybox" else [name]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    shutil.copy(SCRIPT, directory / "discover_hosts.sh")
    return directory


def discover(
    shell: list[str], script: str, cwd: Path, path: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*shell, script],
        cwd=cwd,
        env={"PATH": path or os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def without_sleep(tmp_path: Path, then: str = "") -> str:
    """A PATH on which ``sleep`` takes no time, notes that it was called, and does ``then``."""
    directory = tmp_path / "bin"
    directory.mkdir()
    stub = directory / "sleep"
    stub.write_text(f'#!/bin/sh\necho >>"{tmp_path}/slept"\n{then}\n')
    stub.chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


def test_it_prints_the_list_as_it_stands(shell: list[str], run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "hosts").write_text(LIST)
    for script, cwd in (
        (str(run_dir / "discover_hosts.sh"), tmp_path),
        ("./discover_hosts.sh", run_dir),
        ("discover_hosts.sh", run_dir),
        ("run/discover_hosts.sh", tmp_path),
    ):
        done = discover(shell, script, cwd)
        assert (done.returncode, done.stdout, done.stderr) == (0, LIST, "")


@pytest.mark.parametrize(
    ("content", "printed", "slept"),
    [
        pytest.param("rev-3:0\n", True, 0, id="a job that really has no member"),
        pytest.param("", False, 2, id="empty"),
        pytest.param("node-0.0a1b2c3d:2\n", False, 2, id="no revision"),
        pytest.param("node-0.0a1b2c3d:2\nrev-", False, 2, id="half a revision"),
        pytest.param("\n\n", False, 2, id="empty lines"),
        pytest.param(None, False, 60, id="none for a minute"),
    ],
)
def test_i4_a_whole_list_is_printed_and_never_an_empty_or_partial_one(
    shell: list[str],
    run_dir: Path,
    tmp_path: Path,
    content: str | None,
    printed: bool,
    slept: int,
) -> None:
    if content is not None:
        (run_dir / "hosts").write_text(content)
    (tmp_path / "slept").touch()
    done = discover(shell, "./discover_hosts.sh", run_dir, without_sleep(tmp_path))
    assert (done.returncode, done.stdout) == ((0, content) if printed else (1, ""))
    assert len((tmp_path / "slept").read_text().splitlines()) == slept
    assert content is not None or "does the muster sidecar run?" in done.stderr


def test_a_read_that_hangs_is_bounded(shell: list[str], run_dir: Path, tmp_path: Path) -> None:
    os.mkfifo(run_dir / "hosts")
    done = discover(shell, "./discover_hosts.sh", run_dir, without_sleep(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")


def test_a_first_call_that_comes_too_early_waits_for_the_list(
    shell: list[str], run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "ready").write_text(LIST)
    slow = f'[ "$(wc -l <"{tmp_path}/slept")" -lt 5 ] || mv "{tmp_path}/ready" "{run_dir}/hosts"'
    done = discover(shell, "./discover_hosts.sh", run_dir, without_sleep(tmp_path, slow))
    assert (done.returncode, done.stdout, done.stderr) == (0, LIST, "")


def test_i4_readers_never_see_half_a_list_while_it_changes(run_dir: Path, tmp_path: Path) -> None:
    from agent.rundir.files import RunDir

    directory = RunDir(str(run_dir))
    lists = [f"{'node-0.0a1b2c3d:2' + chr(10)}" * n + f"rev-{n}:0\n" for n in range(1, 30)]
    directory.deliver_hosts(lists[0])
    out, enough = tmp_path / "printed", tmp_path / "enough"
    out.touch()
    loop = "while [ ! -e ../enough ]; do ./discover_hosts.sh || exit 9; echo =; done >../printed"

    def printed() -> list[str]:
        return out.read_text().split("=\n")[:-1]

    deadline_s = time.monotonic() + DEADLINE_S
    with subprocess.Popen(["sh", "-c", loop], cwd=run_dir) as readers:
        try:
            turn = 0
            while readers.poll() is None:
                if len(seen := printed()) >= 40 and len(set(seen)) > 1:
                    break
                assert time.monotonic() < deadline_s, "not enough was read"
                directory.deliver_hosts(lists[turn % len(lists)])
                turn += 1
        finally:
            enough.touch()
    assert readers.returncode == 0
    assert set(printed()) <= set(lists)
