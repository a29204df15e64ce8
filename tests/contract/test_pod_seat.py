# SPDX-License-Identifier: Apache-2.0
"""Two torchruns of one pod, beside each other and one after the other; the handlers are torch's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.distributed", reason="the handlers are torch's")

from torch.distributed.elastic.rendezvous import RendezvousConnectionError

import launcher_shim.c10d.endpoint
import launcher_shim.c10d.launchers
from launcher_shim.c10d.launchers import StageStarts
from launcher_shim.c10d.rounds.inputs import RoundPolicy
from launcher_shim.tcpstore import wire
from rdzv.store.memory.client import MemoryEngine
from tests.support.sidecars.endpoints import Pod, pod
from tests.support.sidecars.handlers import PATIENCE_S, RUN_ID, Torchrun, World
from tests.support.sidecars.processes import until
from tests.support.sidecars.raw_client import connected
from tests.support.sidecars.stages import container

MONITOR_S = 0.1
"""Between two looks of torch's agent at whether somebody waits."""


def hung_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(
        launcher_shim.c10d.endpoint, "RoundPolicy", partial(RoundPolicy, hung_s=seconds)
    )


@asynccontextmanager
async def monitored(one: Torchrun) -> AsyncIterator[set[int]]:
    """Look as the agent does, beside the test: all that was seen."""
    seen: set[int] = set()

    async def look() -> None:
        while True:
            seen.add(await asyncio.to_thread(one.waiting))
            await asyncio.sleep(MONITOR_S)

    looking = asyncio.create_task(look())
    try:
        yield seen
    finally:
        looking.cancel()
        await asyncio.wait([looking])


def started(port: int, run_id: str = RUN_ID) -> tuple[Torchrun, World]:
    one = Torchrun(port, run_id=run_id)
    return one, one.form()


async def is_refused(starting: Awaitable[object]) -> None:
    with pytest.raises(RendezvousConnectionError):
        await asyncio.wait_for(starting, PATIENCE_S)


def seat(one: Pod) -> Any:
    node = one.endpoint.rendezvous()[RUN_ID].snapshot().nodes["w-0"]
    return node.nonce, node.ask, node.state


@pytest.mark.parametrize("run_id", [RUN_ID, "debug"])
async def test_one_beside_another_that_lives_is_refused_and_the_first_is_not_disturbed(
    run_id: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hung_after(monkeypatch, 10 * PATIENCE_S)
    async with pod(MemoryEngine(), "w-0") as one:
        first, world = await asyncio.to_thread(started, one.port)
        assert world[:2] == (0, 1)
        before, round_ = seat(one), one.endpoint.live_rounds()
        async with monitored(first) as seen:
            await is_refused(asyncio.to_thread(started, one.port, run_id))
            assert await asyncio.to_thread(first.waiting) == 0
        assert seen == {0}
        assert seat(one) == before
        assert one.endpoint.live_rounds() == round_
        assert [run for run, _ in one.endpoint.launchers()] == [RUN_ID]
    (refusal,) = [r for r in caplog.records if "takes part in the run" in r.getMessage()]
    assert "--standalone" in refusal.getMessage()


async def test_one_beside_another_that_waits_for_a_key_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hung_after(monkeypatch, 10 * PATIENCE_S)
    engine = MemoryEngine()
    async with pod(engine, "w-0") as one:
        first, _ = await asyncio.to_thread(started, one.port)
        waiting = asyncio.create_task(asyncio.to_thread(first.store.wait, ["never"]))
        _, agent = one.endpoint.launchers()[0]
        await until(lambda: agent.waits > 0)
        await is_refused(asyncio.to_thread(started, one.port))
        # Not before the first world has formed: it would be waited for.
        async with pod(engine, "w-1") as two, connected(two.port) as other:
            await other.open_rendezvous(RUN_ID)
            await other.ask(wire.Set(b"/never", b"1"))
        await waiting


@pytest.mark.parametrize("gone", [True, False], ids=["at once", "once the other is given up"])
async def test_one_after_another_that_is_gone_or_hangs_takes_over(
    monkeypatch: pytest.MonkeyPatch, *, gone: bool
) -> None:
    hung_after(monkeypatch, 10 * PATIENCE_S if gone else 1.0)
    async with pod(MemoryEngine(), "w-0") as one:
        first, _ = await asyncio.to_thread(started, one.port)
        before = seat(one)
        if gone:
            first.end()
        async with asyncio.timeout(PATIENCE_S):
            _, world = await asyncio.to_thread(started, one.port)
        assert world[:2] == (0, 1)
        assert seat(one) != before
        if not gone:
            first.end()


async def test_one_that_comes_before_the_other_is_back_at_a_restarted_sidecar_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung_after(monkeypatch, 10 * PATIENCE_S)
    waits, is_back = asyncio.Event(), asyncio.Event()
    farewells = StageStarts._farewells

    async def until_back(starts: StageStarts) -> None:
        """Wait as it does, and on until the other is back, however long that takes here."""
        waits.set()
        await farewells(starts)
        await is_back.wait()

    monkeypatch.setattr(StageStarts, "_farewells", until_back)
    path, way_back, engine = tmp_path / "c10d.sock", tmp_path / "way.sock", MemoryEngine()
    await asyncio.to_thread(way_back.symlink_to, path)
    async with container(way_back) as port, container(path) as newcomer_port:
        async with pod(engine, "w-0", unix_path=str(path)) as one:
            first, _ = await asyncio.to_thread(started, port)
            before, held = seat(one), one.registrar.held
            await asyncio.to_thread(way_back.unlink)
        async with pod(engine, "w-0", unix_path=str(path), held=held) as one, monitored(first):
            newcomer = asyncio.create_task(asyncio.to_thread(started, newcomer_port))
            async with asyncio.timeout(PATIENCE_S):
                await waits.wait()
            await asyncio.to_thread(way_back.symlink_to, path)
            await until(lambda: any(agent.takes_part for _, agent in one.endpoint.launchers()))
            is_back.set()
            await is_refused(newcomer)
            assert seat(one) == before


async def test_the_first_torchrun_of_a_pod_waits_for_nobody_that_might_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_shim.c10d.launchers, "FAREWELLS_S", 10 * PATIENCE_S)
    path = tmp_path / "c10d.sock"
    async with pod(MemoryEngine(), "w-0", unix_path=str(path)), container(path) as port:
        async with asyncio.timeout(PATIENCE_S):
            _, world = await asyncio.to_thread(started, port)
    assert world[:2] == (0, 1)
