# SPDX-License-Identifier: Apache-2.0
"""What takes a sidecar down, and what it says of its store's version."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic

import pytest

from agent import process
from agent.config.sidecar import Config
from agent.rundir.files import RunDir
from agent.telemetry.http import LoopLag
from agent.upkeep import StoreVersion
from rdzv.errors import ConfigError, StoreUnavailable
from rdzv.store import DEFAULT_TIMEOUT_S, StoreStatus
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from rdzv.store.memory.server import EmbeddedServer
from tests.support.clocks.hand import HandClock
from tests.support.sidecars.in_process import configured
from tests.support.sidecars.jobs import client
from tests.support.sidecars.processes import PATIENCE_S, until
from tests.support.tasks import beside


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
    tmp_path: Path,
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
        async with EmbeddedServer() as server:
            assert await process.run(configured(server.endpoint, tmp_path)) == status
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert vars(record)["event"] == event
    assert str(fault or "loop-lag ended by itself") in record.getMessage()


async def test_it_blocks_no_loop_from_start_to_end(tmp_path: Path) -> None:
    # Blocking calls raise in every test here; this one runs a whole life of a sidecar.
    async with EmbeddedServer() as server:
        config = configured(server.endpoint, tmp_path)

        async def delivered() -> bool:
            return await asyncio.to_thread((tmp_path / "hosts").exists)

        async def stop_once_delivered() -> None:
            await until(delivered)
            os.kill(os.getpid(), signal.SIGTERM)

        stopping = asyncio.create_task(stop_once_delivered())
        assert await process.run(config) == 0
        await stopping
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_a_signal_that_comes_while_it_starts_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver = RunDir.deliver

    def signalled(self: RunDir, config: Config, host: str) -> None:
        deliver(self, config, host)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunDir, "deliver", signalled)
    # As process 1 of a container, which a signal that it does not handle passes by.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        async with EmbeddedServer() as server, asyncio.timeout(PATIENCE_S):
            assert await process.run(configured(server.endpoint, tmp_path)) == 0
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


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
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
    assert [level for level, _ in said(caplog)] == levels
    assert all(words in said(caplog)[-1][1] for words in last)


async def test_a_sidecar_judges_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("rdzv.store.memory.server_calls.VERSION", "3.5.1")
    # A busy machine may give it no answer in time.
    monkeypatch.setattr("agent.parts.StoreVersion", partial(StoreVersion, repeat_s=0.1))
    async with (
        EmbeddedServer() as server,
        beside(process.run(configured(server.endpoint, tmp_path))),
    ):
        await until(lambda: bool(said(caplog)))
    ((level, sentence),) = said(caplog)
    assert (level, "can lose writes" in sentence) == ("WARNING", True)
