# SPDX-License-Identifier: Apache-2.0
"""Reading what the other container has put into the run directory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from launcher_shim.rundir.layout import open_regular, read_untrusted


def test_a_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    assert read_untrusted(tmp_path / "file", 100) == b"0123456789"
    assert read_untrusted(str(tmp_path / "file"), 4) == b"0123"


def test_nothing_is_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"of somebody else")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="link") as raised:
        read_untrusted(tmp_path / "link", 100)
    assert raised.value.errno == errno.ELOOP


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_untrusted(tmp_path / "pipe", 100) == b""
    held = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        assert read_untrusted(tmp_path / "pipe", 100) == b""
    finally:
        os.close(held)


def test_what_is_written_is_a_regular_file(tmp_path: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT
    os.close(open_regular(tmp_path / "file", flags, 0o600))
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="link"):
        open_regular(tmp_path / "link", flags, 0o600)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):
        open_regular(tmp_path / "pipe", flags, 0o600)
    held = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        with pytest.raises(OSError, match="pipe is no regular file"):
            open_regular(str(tmp_path / "pipe"), flags, 0o600)
    finally:
        os.close(held)


def test_nothing_else_opens_files_that_way() -> None:
    root = Path(__file__).parents[2]
    hands = [
        path.relative_to(root).as_posix()
        for package in (
            "agent",
            "console",
            "controller",
            "injection",
            "launcher_shim",
            "muster",
            "rdzv",
        )
        for path in (root / package).rglob("*.py")
        if "O_NONBLOCK" in path.read_text(encoding="utf-8")
    ]
    assert hands == ["launcher_shim/rundir/layout.py"]
