# SPDX-License-Identifier: Apache-2.0
"""Files of the run directory are opened safely; sockets listen as soon as they have names."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from launcher_shim.rundir.layout import (
    PATH_MAX_BYTES,
    PathTooLong,
    bind_loopback,
    nascent_name,
    open_regular,
    publish_socket,
    read_untrusted,
    withdraw_socket,
)


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


def test_a_port_is_chosen_that_both_families_have_free() -> None:
    bound = bind_loopback(0)
    try:
        assert len({one.getsockname()[1] for one in bound}) == 1
        assert bound[0].family == socket.AF_INET
    finally:
        for one in bound:
            one.close()


@pytest.mark.parametrize("taken", [0, -1], ids=["127.0.0.1", "::1 where the machine has it"])
def test_a_taken_port_is_named_with_its_address(taken: int) -> None:
    bound = bind_loopback(0)
    bound[taken].listen()
    address, port = bound[taken].getsockname()[:2]
    for one in bound:
        if one is not bound[taken]:
            one.close()
    try:
        with pytest.raises(OSError, match="in use") as raised:
            bind_loopback(port)
    finally:
        bound[taken].close()
    assert (raised.value.errno, raised.value.filename) == (errno.EADDRINUSE, address)


def listening(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    return listener


def test_a_published_socket_has_its_name_and_mode_and_its_own_inode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nascent = nascent_name("notice.sock")
    with listening(nascent), socket.socket(socket.AF_UNIX) as client:
        inode = publish_socket(nascent, "notice.sock", 0o666)
        client.connect("notice.sock")
    assert not Path(nascent).exists()
    status = Path("notice.sock").stat()
    assert (status.st_mode & 0o777, status.st_ino) == (0o666, inode)


def test_that_of_a_successor_is_not_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with listening("first"), listening("second"):
        first = publish_socket("first", "c10d.sock", 0o666)
        second = publish_socket("second", "c10d.sock", 0o666)
    withdraw_socket("c10d.sock", first)
    assert Path("c10d.sock").stat().st_ino == second
    withdraw_socket("c10d.sock", second)
    assert not Path("c10d.sock").exists()
    withdraw_socket("c10d.sock", second)


def test_a_path_that_leaves_no_room_is_refused_in_one_sentence() -> None:
    path = "/" + PATH_MAX_BYTES * "d" + "/c10d.sock"
    with pytest.raises(PathTooLong, match="too long for a unix socket: choose a shorter run dir"):
        nascent_name(path)
