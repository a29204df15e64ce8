# SPDX-License-Identifier: Apache-2.0
"""What scripts/kubelab may end, and what it may not: processes, networks and clusters of others."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import claim
from tests.support.cluster.lab import MADE_BY_TESTS, Kubelab

TOOLCHAIN = Path(__file__).parents[2] / "scripts" / "toolchain"


@pytest.fixture(autouse=True)
def _importable() -> Iterator[None]:
    sys.path.insert(0, str(TOOLCHAIN))
    yield
    sys.path.remove(str(TOOLCHAIN))


def test_a_pid_that_was_given_out_again_is_nobodys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kubelab import processes

    monkeypatch.setattr(processes, "PIDS", tmp_path)
    ticks = processes.started_ticks(os.getpid())
    assert ticks is not None
    (tmp_path / "ours").write_text(f"{os.getpid()} {ticks}\n")
    (tmp_path / "another").write_text(f"{os.getpid()} {ticks - 1}\n")
    assert processes.pid_of("ours") == os.getpid()
    assert processes.pid_of("another") is None
    processes.stop("another")
    assert not (tmp_path / "another").exists()


@pytest.mark.parametrize(
    ("route", "said"),
    [
        ({"dst": "default", "gateway": "192.0.2.1", "dev": "eth0"}, None),
        ({"dst": "0.0.0.0/1", "dev": "tun0"}, None),
        ({"dst": "10.213.0.0/16", "dev": "muster-lab"}, None),
        ({"dst": "10.88.0.0/16", "dev": "podman0"}, None),
        ({"dst": "fd00::/64", "dev": "eth0"}, None),
        ({"dst": "10.0.0.0/8", "dev": "eth0"}, "10.0.0.0/8 by eth0"),
        ({"type": "local", "dst": "10.213.7.1", "dev": "eth1"}, "10.213.7.1/32 by eth1"),
        ({"type": "blackhole", "dst": "10.213.0.0/17"}, "10.213.0.0/17"),
    ],
)
def test_a_machine_that_has_its_addresses_already_is_told_which(
    route: dict[str, str], said: str | None
) -> None:
    from kubelab import network

    assert network.overlapping([route]) == said


class FolderLab(Kubelab):
    """A cluster that is a folder only."""

    def __init__(self, state: Path, mark: Path) -> None:
        self.state = state
        self.mark = mark
        self.ended = 0

    def command(self, *arguments: str, timeout_s: float = 120.0) -> str:
        if arguments == ("up",):
            self.mark.touch()
            self.state.mkdir()
            return ""
        assert arguments == ("down",)
        shutil.rmtree(self.state, ignore_errors=True)
        self.mark.unlink()
        self.ended += 1
        return ""

    def left_behind(self) -> list[str]:
        return [str(self.state)] if self.state.exists() else []


@pytest.fixture
def folder_lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FolderLab:
    lab = FolderLab(tmp_path / "state", tmp_path / "made-by-tests")
    monkeypatch.setattr(claim, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(claim, "MADE_BY_TESTS", lab.mark)
    # This test keeps its own time.
    monkeypatch.setattr(signal, "setitimer", lambda which, seconds: (0.0, 0.0))
    return lab


def test_a_cluster_that_a_person_has_made_is_not_ended_by_tests(folder_lab: FolderLab) -> None:
    folder_lab.state.mkdir()
    with claim.claimed(folder_lab):
        pass
    assert folder_lab.ended == 0


def test_a_cluster_that_tests_have_made_is_ended_by_the_last_that_uses_it(
    folder_lab: FolderLab,
) -> None:
    first, second = (claim.claimed(folder_lab) for _ in range(2))
    first.__enter__()
    second.__enter__()
    folder_lab.command("up")
    first.__exit__(None, None, None)
    assert folder_lab.ended == 0
    second.__exit__(None, None, None)
    assert folder_lab.ended == 1


def test_a_cluster_of_a_session_that_was_killed_is_ended_by_the_next(folder_lab: FolderLab) -> None:
    folder_lab.command("up")
    with claim.claimed(folder_lab):
        assert folder_lab.ended == 1
        folder_lab.command("up")
    assert folder_lab.ended == 2


def test_tests_and_the_cluster_mean_the_same_mark() -> None:
    from kubelab import layout

    assert MADE_BY_TESTS == layout.MADE_BY_TESTS
