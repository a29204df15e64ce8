# SPDX-License-Identifier: Apache-2.0
"""What a sidecar finds of its launcher, what takes it down, and what it says of its store."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic

import pytest

from agent import process
from agent.config import Config
from agent.launcher_check import LauncherPolicy
from agent.launcher_watch import LauncherWatcher
from agent.rundir.files import RunDir
from agent.rundir.programs import program
from agent.rundir.reports import read_launch
from agent.telemetry.http import LoopLag
from agent.upkeep import StoreVersion
from launcher_shim.c10d.state_codec import SENTINEL
from launcher_shim.pod.launch import Launch
from launcher_shim.rundir import layout
from rdzv.errors import ConfigError, StoreUnavailable
from rdzv.records.job import Member
from rdzv.records.troubles import Bypass
from rdzv.store import DEFAULT_TIMEOUT_S, KeyValue, Put, StoreStatus
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from rdzv.store.memory.server import EmbeddedServer
from tests.support.clocks.hand import HandClock
from tests.support.sidecars.endpoints import Pod, pod
from tests.support.sidecars.in_process import configured
from tests.support.sidecars.jobs import KEYS, client
from tests.support.sidecars.processes import PATIENCE_S, until
from tests.support.sidecars.raw_client import connected
from tests.support.tasks import beside

HERE = KEYS.in_generation(1)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / layout.LAUNCH).mkdir()
    (tmp_path / "progress").mkdir()
    return tmp_path


async def tell(run_dir: Path, launch: Launch) -> None:
    """What ``muster-run`` does."""
    place = run_dir / layout.LAUNCH / layout.LAUNCHER
    nascent = place.with_suffix(".new")
    await asyncio.to_thread(nascent.write_bytes, launch.to_json("a"))
    await asyncio.to_thread(nascent.replace, place)


ELSEWHERE = Launch("torchrun", 7, {"rdzv-endpoint": "localhost:1", "rdzv-backend": "c10d"})
RIGHT = Launch("torchrun", 8, {"rdzv-endpoint": "localhost:29400", "rdzv-backend": "c10d"})


@asynccontextmanager
async def looking(
    one: Pod, run_dir: Path, clock: Callable[[], float]
) -> AsyncIterator[LauncherWatcher]:
    watcher = LauncherWatcher(
        RunDir(str(run_dir)),
        one.client,
        one.registrar,
        one.endpoint,
        LauncherPolicy("digits", 1, 4, 29400),
        ready=lambda: True,
        clock=clock,
        look_s=0.02,
    )
    async with beside(watcher.run()):
        yield watcher


def says(one: Pod, kind: str) -> bool:
    """Whether the store says so of the launcher; ``""``: nothing."""
    kv = one.client.mirror.kvs.get(HERE.bypass("w-0"))
    return (Bypass.from_kv(kv).kind if kv else "") == kind


async def said(one: Pod, kind: str) -> KeyValue | None:
    """Wait until the store says so."""
    await until(lambda: says(one, kind))
    return one.client.mirror.kvs.get(HERE.bypass("w-0"))


async def test_it_is_said_while_it_is_so_and_on_the_members_lease(run_dir: Path) -> None:
    await tell(run_dir, ELSEWHERE)
    async with pod(MemoryEngine(), "w-0") as one, looking(one, run_dir, HandClock()) as watcher:
        kv = await said(one, "elsewhere")
        assert kv is not None
        assert kv.lease == one.registrar.lease_id
        assert watcher.by_kind()["elsewhere"] == 1.0
        snapshot = one.client.membership.snapshot()
        await tell(run_dir, RIGHT)
        await said(one, "")
        assert one.client.membership.snapshot() is snapshot, "it wakes nobody"


async def test_nothing_is_written_while_nothing_changes(run_dir: Path) -> None:
    engine = MemoryEngine()
    async with pod(engine, "w-0") as one, looking(one, run_dir, HandClock()):
        before = engine.revision
        await asyncio.sleep(0.2)
        assert engine.revision == before
        await tell(run_dir, ELSEWHERE)
        await said(one, "elsewhere")
        await asyncio.sleep(0.2)
        assert engine.revision <= before + 2  # a second look may come before the watch


async def test_a_member_that_lost_its_lease_says_it_again(run_dir: Path) -> None:
    await tell(run_dir, ELSEWHERE)
    engine = MemoryEngine()
    async with pod(engine, "w-0") as one, looking(one, run_dir, HandClock()):
        first = await said(one, "elsewhere")
        assert first is not None
        engine.revoke(first.lease)

        async def again() -> bool:
            kv = one.client.mirror.kvs.get(HERE.bypass("w-0"))
            return kv is not None and kv.lease not in (0, first.lease)

        await until(again)


async def test_a_torchrun_that_connects_ends_its_minute(run_dir: Path) -> None:
    await tell(run_dir, RIGHT)
    clock = HandClock()
    async with pod(MemoryEngine(), "w-0") as one, looking(one, run_dir, clock):

        async def is_absent() -> bool:
            # Again and again: its minute begins with the first look, whenever that is over.
            clock.now_s += 60
            return says(one, "absent")

        await until(is_absent)
        async with connected(one.port) as client:
            assert await client.open_rendezvous("digits") == SENTINEL
            # It has opened the rendezvous, and has not said yet who it is.
            await asyncio.sleep(0.1)
            await said(one, "absent")


async def test_the_workers_of_a_horovod_job_are_left_alone(run_dir: Path) -> None:
    clock = HandClock()
    launcher = Member("l", "uid-l", 1, "10.0.0.9", "", "launcher", 0, 1, 4)
    async with pod(MemoryEngine(), "w-0") as one:
        await one.client.store.txn([], [Put(HERE.member("l"), launcher.to_json())])
        await until(lambda: "l" in one.client.membership.snapshot().members)
        async with looking(one, run_dir, clock) as watcher:
            await asyncio.sleep(0.1)
            clock.now_s += 600
            await asyncio.sleep(0.1)
            assert watcher.finding.kind == ""


@pytest.fixture
def wrapper(run_dir: Path) -> Path:
    """``muster-run`` as it is delivered, and a torchrun beside it that only waits."""
    (run_dir / "env").write_text("PET_RDZV_ENDPOINT=localhost:29400\nPET_NNODES=2:4\n")
    (run_dir / "bin").mkdir()
    wrapper, torchrun = run_dir / "bin" / "muster-run", run_dir / "torchrun"
    wrapper.write_bytes(program("muster-run"))
    torchrun.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    for path in (wrapper, torchrun):
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return wrapper


async def test_muster_run_tells_of_a_torchrun_behind_a_script(run_dir: Path, wrapper: Path) -> None:
    line = f"{run_dir / 'torchrun'} --nnodes 1:2 --rdzv-id=x train.py --token hunter2"
    process = await asyncio.create_subprocess_exec(
        *(str(wrapper), "--", "sh", "-c", f"echo begins; {line}; true"),
        env={**os.environ, "MUSTER_RUN_DIR": str(run_dir)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:

        async def told() -> bool:
            launch = await asyncio.to_thread(read_launch, run_dir)
            return launch is not None and launch.launcher == "torchrun"

        await until(told)
        launch = await asyncio.to_thread(read_launch, run_dir)
        content = await asyncio.to_thread((run_dir / layout.LAUNCH / layout.LAUNCHER).read_bytes)
    finally:
        process.send_signal(signal.SIGINT)
        await process.wait()
    assert launch is not None
    assert launch.nnodes == "1:2"
    assert launch.rdzv_endpoint == "localhost:29400"
    assert b"hunter2" not in content
    # The command has ended: a sidecar that starts now must not believe that it runs.
    assert not await asyncio.to_thread((run_dir / layout.LAUNCH / layout.LAUNCHER).exists)


async def test_a_connection_that_stored_nothing_is_forgotten_when_it_ends() -> None:
    async with pod(MemoryEngine(), "w-0") as one:
        async with connected(one.port) as client:
            await client.open_rendezvous("digits")
            assert [run_id for run_id, _ in one.endpoint.launchers()] == ["digits"]
        # Else the next life of the job would take it for a torchrun that goes on.
        await until(lambda: one.endpoint.launchers() == [])


@pytest.fixture
async def config(tmp_path: Path) -> AsyncIterator[Config]:
    """The configuration of a sidecar whose store runs."""
    async with EmbeddedServer() as server:
        yield configured(server.endpoint, tmp_path)


@pytest.mark.parametrize(
    ("fault", "status", "event"),
    [
        (ZeroDivisionError("planted"), 70, "defect"),
        (None, 70, "defect"),
        (StoreUnavailable("planted"), 69, "store_unavailable"),
        (ConfigError("planted"), 2, "misconfigured"),
    ],
)
async def test_a_task_that_ends_takes_it_down_with_a_clear_line(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Exception | None,
    status: int,
    event: str,
) -> None:
    async def end(self: LoopLag) -> None:
        if fault is not None:
            raise fault

    monkeypatch.setattr(LoopLag, "run", end)
    with caplog.at_level(logging.INFO):
        assert await process.run(config) == status
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert vars(record)["event"] == event
    assert str(fault or "loop-lag ended by itself") in record.getMessage()


async def test_it_blocks_no_loop_from_start_to_end(tmp_path: Path, config: Config) -> None:
    # Blocking calls raise in every test here; this one runs a whole life of a sidecar.
    async def stop_once_delivered() -> None:
        await until(lambda: asyncio.to_thread((tmp_path / "hosts").exists))
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = asyncio.create_task(stop_once_delivered())
    assert await process.run(config) == 0
    await stopping
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_a_signal_at_its_start_ends_it(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver = RunDir.deliver

    def signalled(self: RunDir, config: Config, host: str) -> None:
        deliver(self, config, host)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunDir, "deliver", signalled)
    # As process 1 of a container, which a signal that it does not handle passes by.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await process.run(config) == 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


async def test_the_loops_lag_is_measured() -> None:
    clock = HandClock()
    lag = LoopLag(clock)
    for passes_s in (0.0, 1.25, 0.75, 1.5):
        clock.now_s += passes_s
        await lag.step()
    assert lag.worst_s == pytest.approx(0.5)


class Versioned(MemoryStore):
    """Says of itself what it is told to."""

    def __init__(self, engine: MemoryEngine, *versions: str) -> None:
        super().__init__(engine)
        self._versions = list(versions)
        self.asked = 0

    async def status(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> StoreStatus:
        """Tell the next version, and the last one again and again; an empty one is no answer."""
        self.asked += 1
        version = self._versions.pop(0) if len(self._versions) > 1 else self._versions[0]
        if not version:
            raise StoreUnavailable("status: no answer")
        return replace(await super().status(timeout_s=timeout_s), version=version)


@asynccontextmanager
async def judging(store: Versioned) -> AsyncIterator[None]:
    async with (
        client(store.engine) as one,
        beside(StoreVersion(replace(one, store=store), monotonic, repeat_s=0.01).run()),
    ):
        yield


def process_said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if vars(record).get("event") == "store_version"
    ]


async def until_asked(store: Versioned, times: int) -> None:
    await until(lambda: store.asked >= times)


@pytest.mark.parametrize(
    ("versions", "asked", "levels", "last"),
    [
        (("3.5.7",), 5, ["WARNING"], ("etcd 3.5.7", "ahead of pending events", "use 3.5.23")),
        (("3.6.16", "", "3.6.16", "3.5.1"), 6, ["INFO", "WARNING"], ("etcd 3.5.1",)),
    ],
    ids=["told once", "another one is told of too"],
)
async def test_each_version_is_told_once(
    caplog: pytest.LogCaptureFixture,
    versions: tuple[str, ...],
    asked: int,
    levels: list[str],
    last: tuple[str, ...],
) -> None:
    caplog.set_level(logging.INFO)
    store = Versioned(MemoryEngine(), *versions)
    async with judging(store):
        await until_asked(store, asked)
    assert [level for level, _ in process_said(caplog)] == levels
    assert all(words in process_said(caplog)[-1][1] for words in last)


async def test_a_sidecar_judges_its_store(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("rdzv.store.memory.server_calls.VERSION", "3.5.1")
    # A busy machine may give it no answer in time.
    monkeypatch.setattr("agent.parts.StoreVersion", partial(StoreVersion, repeat_s=0.1))
    async with beside(process.run(config)):
        await until(lambda: bool(process_said(caplog)))
    ((level, sentence),) = process_said(caplog)
    assert (level, "can lose writes" in sentence) == ("WARNING", True)
