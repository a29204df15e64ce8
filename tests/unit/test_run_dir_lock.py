# SPDX-License-Identifier: Apache-2.0
"""One sidecar for each run directory."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path

import pytest

from agent import process as module
from agent.process import locked
from launcher_shim.rundir import layout
from rdzv.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.0)


def test_a_second_sidecar_is_told_whose_the_directory_is(tmp_path: Path) -> None:
    with (
        locked(tmp_path, "w0"),
        pytest.raises(ConfigError, match=rf"in use by the sidecar of w0 \(pid {os.getpid()}\)"),
    ):
        locked(tmp_path, "w9")
    assert (tmp_path / layout.LOCK).read_text().startswith("w0 "), "left as it was"


def test_it_is_free_again_once_its_owner_is_gone(tmp_path: Path) -> None:
    locked(tmp_path, "w0").close()
    with locked(tmp_path, "w1"):
        assert (tmp_path / layout.LOCK).read_text() == f"w1 (pid {os.getpid()})"
    assert (tmp_path / layout.LOCK).stat().st_mode & 0o777 == 0o600


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("kept")
    (tmp_path / layout.LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be locked"):
        locked(tmp_path, "w0")
    assert (tmp_path / "elsewhere").read_text() == "kept"


def test_a_pipe_in_its_place_is_an_answer_in_one_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / layout.LOCK)
    with pytest.raises(ConfigError, match=r"cannot be locked \(lock is no regular file\)"):
        locked(tmp_path, "w0")
    (tmp_path / layout.LOCK).unlink()
    locked(tmp_path, "w0").close()


def test_a_volume_without_locks_is_told_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), locked(tmp_path, "w0"):
        assert "has no locks" in caplog.text
