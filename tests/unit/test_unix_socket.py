# SPDX-License-Identifier: Apache-2.0
"""A unix socket in the run directory: there at once whole, and nobody else's is removed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from launcher_shim.rundir.layout import (
    PATH_MAX_BYTES,
    PathTooLong,
    nascent_name,
    publish_socket,
    withdraw_socket,
)


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
