# SPDX-License-Identifier: Apache-2.0
"""An sshd of this user on loopback, with keys that both sides know already, for comparison."""

from __future__ import annotations

import asyncio
import getpass
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.etcd_members import free_port
from console.local import processes

LISTEN_TIMEOUT_S = 30.0
LOOK_S = 0.05


@asynccontextmanager
async def sshd(directory: Path) -> AsyncIterator[tuple[str, ...]]:
    """Run an sshd in ``directory``; yields the ssh command line that precedes a command."""
    program = _found("sshd")
    _make_folders(directory)
    for name in ("host", "user"):
        key = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name))
        await asyncio.to_thread(subprocess.run, key, check=True)
    port = free_port()
    (directory / "authorized").write_bytes((directory / "user.pub").read_bytes())
    host_key = (directory / "host.pub").read_text().rsplit(" ", 1)[0]
    (directory / "known").write_text(f"[127.0.0.1]:{port} {host_key}\n")
    options = {
        "HostKey": directory / "host",
        "AuthorizedKeysFile": directory / "authorized",
        "PidFile": "none",
        "UsePAM": "no",
        "StrictModes": "no",
        "PermitRootLogin": "yes",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    listen = ("-D", "-e", "-f", "/dev/null", "-p", str(port), "-o", "ListenAddress=127.0.0.1")
    daemon = await processes.start_child(
        (program, *listen, *words), dict(os.environ), directory / "log"
    )
    try:
        await until(lambda: "listening" in (directory / "log").read_text())
        yield (
            *(_found("ssh"), "-F", "/dev/null", "-i", str(directory / "user"), "-p", str(port)),
            *("-o", f"UserKnownHostsFile={directory / 'known'}", "-o", "BatchMode=yes"),
            f"{getpass.getuser()}@127.0.0.1",
        )
    finally:
        await processes.end_child(daemon, LISTEN_TIMEOUT_S)


def _make_folders(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd requires it if run by root


def _found(program: str) -> str:
    path = shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
    if path is None:
        raise RuntimeError(f"there is no {program}: install the package openssh-server")
    return path


async def until(holds: Callable[[], bool]) -> None:
    """Poll a condition until it holds; raises ``TimeoutError`` after ``LISTEN_TIMEOUT_S``."""
    async with asyncio.timeout(LISTEN_TIMEOUT_S):
        while not holds():  # noqa: ASYNC110 - a process has no event to give
            await asyncio.sleep(LOOK_S)
