# SPDX-License-Identifier: Apache-2.0
"""The run directory: its names, safe files, sockets, one sidecar, and a disk that hangs."""

from __future__ import annotations

import ast
import asyncio
import errno
import fcntl
import logging
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

import muster.gate
import muster.shard_log
import muster.waiting
import muster.world.conduct
from agent import process, running
from agent.process import locked
from agent.rundir.files import State
from agent.running import KeptRegistration
from launcher_shim.rundir import layout
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
from rdzv.errors import ConfigError
from rdzv.members.registration import Held
from tests.support.waiting import DEADLINE_S


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


ROOT = Path(__file__).parents[2]
LAYOUT = "launcher_shim/rundir/layout.py"
NAMES = {name: text for name, text in vars(layout).items() if name.isupper()}
MISTAKABLE = {layout.ENVIRONMENT, layout.HOSTS, layout.PROGRESS, layout.PROGRAMS, layout.MODULES}
MISTAKABLE |= {layout.LAUNCH, layout.WORKERS, layout.TORCHRUN, layout.MUSTER_RUN}
MISTAKABLE |= {layout.WORLD}
"""Names that are words as well: where they stand between quotes, they may mean something else."""

REPEATS = ("muster/gate.py", "muster/gate.py", "muster/shard_log.py")
"""Modules of ``import muster``, which has no layout beside it."""


def texts(path: Path) -> set[str]:
    """Every string of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_names_differ() -> None:
    assert len({*NAMES.values()}) == len(NAMES)


@pytest.mark.parametrize(
    "package", ["agent", "console", "controller", "injection", "launcher_shim", "muster", "rdzv"]
)
def test_a_name_stands_in_the_layout_alone(package: str) -> None:
    elsewhere = {
        f"{relative}: {name}"
        for path in (ROOT / package).rglob("*.py")
        if (relative := path.relative_to(ROOT).as_posix()) not in (LAYOUT, *REPEATS)
        for name in texts(path) & ({*NAMES.values()} - MISTAKABLE)
    }
    assert elsewhere == set()


def test_import_muster_repeats_the_names_that_it_uses() -> None:
    assert muster.gate.GATE_NAME == layout.GATE
    assert muster.gate.PAGE_NAME == layout.GATE_PAGE
    assert muster.gate.ENVIRONMENT_NAME == layout.ENVIRONMENT
    assert muster.waiting.DIRECTORY_NAME == layout.PROGRESS
    assert f"{layout.PROGRESS}/{muster.waiting.IMPORTED_NAME}" == layout.IMPORTED
    assert muster.shard_log.SOCKET_NAME == layout.SHARDS_SOCKET
    assert muster.world.conduct.WORLD_NAME == layout.WORLD


def test_the_script_for_horovodrun_prints_the_host_list() -> None:
    script = ROOT / "launcher_shim" / "pod" / layout.DISCOVER_HOSTS
    assert f"list=./{layout.HOSTS} ;;" in script.read_text(encoding="utf-8")


class Disk:
    """A run directory: its first write hangs until ``goes_on`` is set, and then may fail."""

    path = Path("run")

    def __init__(self, *, fails: bool = False) -> None:
        self.goes_on = threading.Event()
        self.landed: list[int] = []
        self.has_landed = threading.Event()
        self._fails = fails
        self._begun = False

    def keep(self, state: State) -> None:
        first, self._begun = not self._begun, True
        if first:
            assert self.goes_on.wait(DEADLINE_S)
            if self._fails:
                raise OSError(errno.ENOSPC, "No space left on device")
        assert state.held is not None
        self.landed.append(state.held.incarnation)
        self.has_landed.set()


def held(incarnation: int) -> Held:
    return Held(generation=1, incarnation=incarnation)


async def given_up(keeping: asyncio.Task[None]) -> None:
    """Cancel a wait whose write hangs, as the registrar does at its deadline."""
    await asyncio.wait((keeping,), timeout=0.1)
    assert not keeping.done()
    keeping.cancel()
    await asyncio.wait((keeping,))


async def test_i6_a_write_that_outlasts_its_wait_lands_before_a_newer_one() -> None:
    disk: Any = Disk()
    kept = KeptRegistration(disk, "uid")
    await given_up(asyncio.create_task(kept.keep(held(1))))
    newer = asyncio.create_task(kept.keep(held(2)))
    await asyncio.wait((newer,), timeout=0.1)
    disk.goes_on.set()
    async with asyncio.timeout(DEADLINE_S):
        await newer
    assert disk.landed == [1, 2]


async def test_a_write_that_fails_after_its_wait_is_logged_and_retried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(running, "RETRY_PAUSE_S", 0.01)
    caplog.set_level("INFO")
    disk: Any = Disk(fails=True)
    kept = KeptRegistration(disk, "uid")
    await given_up(asyncio.create_task(kept.keep(held(1))))
    disk.goes_on.set()
    assert await asyncio.to_thread(disk.has_landed.wait, DEADLINE_S)
    assert disk.landed == [1]
    kept.end()
    events = [getattr(record, "event", "") for record in caplog.records]
    assert events[:1] == ["state_not_kept"]


async def test_a_defect_of_the_write_is_not_swallowed() -> None:
    disk: Any = Disk()
    disk.goes_on.set()
    disk.landed = None  # what the write appends to
    with pytest.raises(AttributeError):
        async with asyncio.timeout(DEADLINE_S):
            await KeptRegistration(disk, "uid").keep(held(1))


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOCK_TIMEOUT_S", 0.0)


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
