# SPDX-License-Identifier: Apache-2.0
"""The run directory between two users: a sidecar and a training container that share no user."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from rdzv.store.memory.server import EmbeddedServer
from tests.support.sidecars.processes import PATIENCE_S, ROOT, Sidecar, sidecar, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two other users")

SIDECAR, TRAINER, FS_GROUP = 65532, 1000, 2000

JOB_UID = "uid-of-the-job"
"""Whose next pod joins at once, also after one that was ended before it could leave."""


@dataclass(frozen=True)
class Pod:
    """``owner``, ``group`` and ``mode`` of the directory; ``groups`` are more of both users'."""

    owner: int = 0
    group: int = 0
    mode: int = 0o777
    groups: str = ""
    umask: str = "022"


EMPTY_DIR = Pod()
PODS = {
    "no common group": EMPTY_DIR,
    "no common group, umask 077": Pod(umask="077"),
    "fsGroup": Pod(group=FS_GROUP, mode=0o2777, groups=f"{FS_GROUP}"),
    "fsGroup, umask 077": Pod(group=FS_GROUP, mode=0o2777, groups=f"{FS_GROUP}", umask="077"),
    "the sidecar's own, umask 077": Pod(owner=SIDECAR, group=SIDECAR, mode=0o755, umask="077"),
}
"""The first four are what a kubelet makes of an emptyDir."""
CASES = [
    pytest.param(pod, id=name, marks=() if "umask" in name else pytest.mark.long)
    for name, pod in PODS.items()
]


def user(pod: Pod, uid: int, *command: str) -> tuple[str, ...]:
    """The arguments of Python that run a module as one of the users."""
    return (
        "-m",
        "tests.support.sidecars.as_user",
        f"{uid}",
        f"{uid}",
        pod.groups,
        pod.umask,
        *command,
    )


async def visit(pod: Pod, uid: int, role: str, run_dir: Path) -> dict[str, object]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *user(pod, uid, "tests.support.sidecars.rundir_visitor", role, str(run_dir)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    told: dict[str, object] = json.loads(out)
    return told


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A mounted directory that every user can reach; those of pytest are closed to others."""
    with tempfile.TemporaryDirectory(prefix="muster-users-") as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "run"
        path.mkdir()
        yield path


def as_sidecar(
    server: EmbeddedServer, run_dir: Path, pod: Pod = EMPTY_DIR
) -> AbstractAsyncContextManager[Sidecar]:
    """A sidecar under its user."""
    runner = user(pod, SIDECAR, "tests.support.sidecars.patient")
    return sidecar(server.endpoint, run_dir, "node-0", runner, MUSTER_JOB_UID=JOB_UID)


@asynccontextmanager
async def running(pod: Pod, server: EmbeddedServer, run_dir: Path) -> AsyncIterator[Sidecar]:
    """One that has delivered."""
    os.chown(run_dir, pod.owner, pod.group)
    await asyncio.to_thread(run_dir.chmod, pod.mode)
    async with as_sidecar(server, run_dir, pod) as started:
        await started.until_ready()
        await until(lambda: asyncio.to_thread((run_dir / "gate.json").exists))
        yield started


@pytest.mark.parametrize("pod", CASES)
async def test_each_user_reads_what_the_other_writes(
    pod: Pod, server: EmbeddedServer, run_dir: Path
) -> None:
    async with running(pod, server, run_dir):
        told = await visit(pod, TRAINER, "train", run_dir)
        replaceable = told.pop("replaceable")
        assert told == {
            "variables": True,
            "hosts": 0,
            "program": True,
            "library": True,
            "gate": True,
            "connected": [True, True],
        }
        # Whoever may write to a directory that is not sticky may replace what lies in it.
        assert bool(replaceable) == bool(pod.mode & stat.S_IWOTH)
        seen = await visit(pod, SIDECAR, "watch", run_dir)
        assert seen == {"steps": [8], "launch": True}
        second = await visit(pod, TRAINER + 1, "meddle", run_dir)
        assert second == {"progress": [], "launch": []}
    async with running(pod, server, run_dir) as again:
        assert (await again.until_logged("start"))["fresh"] is False


@pytest.mark.parametrize("there", ["a link", "a pipe", "a directory", "too much"])
async def test_what_the_other_user_puts_in_the_place_of_a_file_stops_no_sidecar(
    there: str, server: EmbeddedServer, run_dir: Path
) -> None:
    async with running(EMPTY_DIR, server, run_dir) as before:
        await before.end()

    def put() -> None:
        for name in ("state.json", "hosts", "gate.json", "gate.page", "drain.json"):
            path = run_dir / name
            path.unlink(missing_ok=True)
            if there == "a link":
                path.symlink_to("/proc/self/environ")
            elif there == "a pipe":
                os.mkfifo(path)
            elif there == "a directory":
                path.mkdir()
            else:
                path.write_bytes(b"[" * 2_000_000)

    await asyncio.to_thread(put)
    async with as_sidecar(server, run_dir) as again:
        if there == "a directory":
            async with asyncio.timeout(PATIENCE_S):
                assert await again.process.wait() == 2
        else:
            await again.until_ready()
        text = json.dumps(again.lines)
        assert "Traceback" not in text
        assert "PATH=" not in text


async def test_a_directory_in_the_place_of_the_host_list_alone_stops_no_sidecar(
    server: EmbeddedServer, run_dir: Path
) -> None:
    async with running(EMPTY_DIR, server, run_dir) as before:
        await before.end()

    hosts = run_dir / "hosts"
    await asyncio.to_thread(hosts.unlink)
    await asyncio.to_thread(hosts.mkdir)
    async with as_sidecar(server, run_dir) as again:
        assert "hosts cannot be read" in (await again.until_logged("hosts_unreadable"))["message"]
        await again.until_logged("hosts_not_delivered")
        assert (await again.get("/healthz"))[0] == 200
        await asyncio.to_thread(hosts.rmdir)
        await again.until_ready()
        await again.until_hosts(1)


async def test_a_directory_that_is_a_link_is_refused_in_one_sentence(
    server: EmbeddedServer, run_dir: Path
) -> None:
    elsewhere = run_dir.parent / "elsewhere"
    await asyncio.to_thread(elsewhere.mkdir)
    await asyncio.to_thread((run_dir / "python").symlink_to, elsewhere)
    async with sidecar(server.endpoint, run_dir) as started:
        async with asyncio.timeout(PATIENCE_S):
            assert await started.process.wait() == 2
    (line,) = started.lines
    assert "python is a link" in line["message"]
    assert "MUSTER_RUN_DIR" in line["message"]
    assert await asyncio.to_thread(os.listdir, elsewhere) == []
