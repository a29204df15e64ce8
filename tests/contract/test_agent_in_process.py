# SPDX-License-Identifier: Apache-2.0
"""What takes a sidecar down, and with which status; in this process, to plant the cause."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest

from agent import process
from agent.config.sidecar import Config
from agent.rundir.files import RunDir
from agent.telemetry.http import LoopLag
from rdzv.errors import ConfigError, StoreUnavailable
from rdzv.store.memory.server import EmbeddedServer
from tests.support.clocks.hand import HandClock
from tests.support.sidecars.in_process import configured
from tests.support.sidecars.processes import PATIENCE_S, until


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
