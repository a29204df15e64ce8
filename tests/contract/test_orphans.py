# SPDX-License-Identifier: Apache-2.0
"""Processes that outlive their world below ``muster-run``, and those beside it that stay."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from launcher_shim.tcpstore import wire
from rdzv.store.memory.server import EmbeddedServer
from tests.support.sidecars.processes import until
from tests.support.sidecars.raw_client import connected
from tests.support.sidecars.relayed_pod import RelayedPod, relayed_pod

WORLD = {"TORCHELASTIC_RUN_ID": "digits", "MASTER_ADDR": "localhost", "MASTER_PORT": "4000"}
START = """
import os, subprocess, sys, time
folder, world = sys.argv[1], dict(pair.split("=") for pair in sys.argv[2:])
def start(name, environ, then="exec sleep 600"):
    writes = f"echo $$ > {folder}/{name}.new; mv {folder}/{name}.new {folder}/{name}; {then}"
    return subprocess.Popen(["sh", "-c", writes], env={**os.environ, **environ})
def leave(name, then):
    start("worker", world, f"setsid sh -c 'echo $$ > {folder}/{name}; {then}' & exit").wait()
start("beside", {})
start("of-operator", {**world, "TORCHELASTIC_RUN_ID": ""})
start("other", {**world, "TORCHELASTIC_RUN_ID": "other"})
leave("stubborn", "trap : TERM; while :; do sleep 1; done")
leave("tracker", "exec sleep 600")
while not os.path.exists(folder + "/go"):
    time.sleep(0.05)
leave("late", "exec sleep 600")
os.execvp("sleep", ["sleep", "600"])
"""
"""A command that starts processes of workers that have ended, and others; each writes its number.
``other`` is a worker of another torchrun, which is the command itself."""
STAY = {"beside", "of-operator", "other"}
ALL = {*STAY, "stubborn", "tracker"}

Start = Callable[..., AbstractAsyncContextManager[RelayedPod]]


def live(folder: Path) -> set[str]:
    """The names of those that have not ended."""
    found = set()
    for path in folder.iterdir():
        try:
            stat = Path(f"/proc/{int(path.read_text() or 0)}/stat").read_text()
        except (OSError, ValueError):
            continue
        if stat.rpartition(")")[2].split()[0] != "Z":
            found.add(path.name)
    return found


@pytest.fixture
def start(server: EmbeddedServer, tmp_path: Path) -> Start:
    """Starts a pod with such a command; its container's environment has ``environ``."""
    (tmp_path / "pids").mkdir()

    @asynccontextmanager
    async def running(**environ: str) -> AsyncIterator[RelayedPod]:
        world = ["=".join(pair) for pair in WORLD.items()]
        command = (sys.executable, "-c", START, str(tmp_path / "pids"), *world)
        async with relayed_pod(
            server.endpoint, tmp_path / "run", *command, of_container=environ
        ) as pod:
            await until_live(tmp_path / "pids", ALL)
            yield pod

    return running


async def until_live(folder: Path, names: set[str]) -> None:
    async def there() -> bool:
        return await asyncio.to_thread(live, folder) == names

    await until(there)


MEETING = "/torch.rendezvous.digits.{}/{}"


@pytest.mark.parametrize("name", ["MASTER_ADDR", "torchelastic/role_info/0"])
async def test_what_outlived_its_world_has_ended_before_the_next_one_starts(
    start: Start, tmp_path: Path, name: str
) -> None:
    async with start() as pod, connected(pod.port) as torchrun:
        await torchrun.open_rendezvous("digits")
        key = MEETING.format(1, name).encode()
        await torchrun.ask(wire.Set(key, b"x"))
        assert await torchrun.ask(wire.Get(key)) == b"x"
        assert await asyncio.to_thread(live, tmp_path / "pids") == STAY


async def test_requests_of_a_running_world_end_nothing(start: Start, tmp_path: Path) -> None:
    async with start() as pod:
        async with connected(pod.port) as torchrun:
            await torchrun.open_rendezvous("digits")
            for key in (b"/torch.rendezvous.digits", b"/torch.rendezvous.digits.0/some/key"):
                await torchrun.ask(wire.Set(key, b"x"))
                assert await torchrun.ask(wire.Get(key)) is not None
        async with connected(pod.port) as another:
            assert await another.ask(wire.Get(b"/a")) == b""
        assert await asyncio.to_thread(live, tmp_path / "pids") == ALL


async def test_what_outlived_the_last_world_of_a_torchrun_ends_with_it(
    start: Start, tmp_path: Path
) -> None:
    """The command goes on after it, as a shell with a second stage does."""
    async with start(MUSTER_KEEP_ORPHANS="0") as pod:
        async with connected(pod.port) as torchrun:
            await torchrun.open_rendezvous("digits")
            key = MEETING.format(1, "MASTER_PORT").encode()
            await torchrun.ask(wire.Set(key, b"x"))
            assert await torchrun.ask(wire.Get(key)) == b"x"
            await asyncio.to_thread((tmp_path / "pids" / "go").touch)
            await until_live(tmp_path / "pids", {*STAY, "late"})
        await until_live(tmp_path / "pids", STAY)


async def test_orphans_are_kept_if_the_pod_says_so(start: Start, tmp_path: Path) -> None:
    async with start(MUSTER_KEEP_ORPHANS="1") as pod, connected(pod.port) as torchrun:
        await torchrun.open_rendezvous("digits")
        key = MEETING.format(1, "MASTER_ADDR").encode()
        await torchrun.ask(wire.Set(key, b"x"))
        assert await torchrun.ask(wire.Get(key)) == b"x"
        assert await asyncio.to_thread(live, tmp_path / "pids") == ALL
