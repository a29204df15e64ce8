# SPDX-License-Identifier: Apache-2.0
"""When the end of a worker is told to horovodrun."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_shim.exit_status import EXIT_HOROVOD_REMOVED
from launcher_shim.horovod.exec.client import (
    LIMIT_S,
    LOOK_S,
    SEEN_S,
    delay_exit,
)


def write(run_dir: Path, hosts: str, least: int = 2) -> None:
    (run_dir / "hosts").write_text("".join(f"{host}.0a0a0a0a:2\n" for host in hosts) + "rev-7:0\n")
    (run_dir / "env").write_text(f"# of the sidecar\nPET_NNODES={least}:4\n")


def waited_s(run_dir: Path, status: int = 143, changes: dict[float, str] | None = None) -> float:
    """How long the end of a worker on host a is kept back; ``changes`` are lists to come."""
    now = 100.0
    left = dict(changes or {})

    def sleep(duration_s: float) -> None:
        nonlocal now
        now += duration_s
        for at_s in [at_s for at_s in left if now - 100.0 >= at_s]:
            write(run_dir, left.pop(at_s))

    delay_exit("a.0a0a0a0a", status, run_dir, lambda: now, sleep)
    return now - 100.0


def test_the_end_of_a_worker_whose_host_is_listed_is_told_at_once(tmp_path: Path) -> None:
    write(tmp_path, "a")
    assert waited_s(tmp_path) == 0


@pytest.mark.parametrize("status", [0, EXIT_HOROVOD_REMOVED])
def test_what_is_as_it_should_be_is_told_at_once(tmp_path: Path, status: int) -> None:
    write(tmp_path, "b")
    assert waited_s(tmp_path, status) == 0


def test_with_enough_others_it_is_told_once_horovodrun_has_seen_the_list(tmp_path: Path) -> None:
    write(tmp_path, "bc")
    assert waited_s(tmp_path) == pytest.approx(SEEN_S, abs=LOOK_S)


def test_below_min_it_is_told_after_another_has_come(tmp_path: Path) -> None:
    write(tmp_path, "b")
    assert waited_s(tmp_path, changes={40: "bc"}) == pytest.approx(40 + SEEN_S, abs=2 * LOOK_S)
    write(tmp_path, "")
    assert waited_s(tmp_path) == pytest.approx(LIMIT_S, abs=LOOK_S)


@pytest.mark.parametrize("env", ["", "PET_NNODES=\n", None])
def test_without_a_launchers_run_directory_nothing_is_kept_back(
    tmp_path: Path, env: str | None
) -> None:
    if env is not None:
        write(tmp_path, "b")
        (tmp_path / "env").write_text(env)
    assert waited_s(tmp_path) == 0
