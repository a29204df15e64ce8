# SPDX-License-Identifier: Apache-2.0
"""A pod that was drained by hand and left alone, while the job goes through its stages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed", reason="the handlers are torch's")

import launcher_shim.c10d.launchers
from launcher_shim.tcpstore import wire
from rdzv.records.drain import Drain
from rdzv.store import Delete, Put
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.sidecars.endpoints import Pod, pod
from tests.support.sidecars.handlers import PATIENCE_S, Torchrun
from tests.support.sidecars.jobs import KEYS
from tests.support.sidecars.processes import until
from tests.support.sidecars.raw_client import connected
from tests.support.sidecars.stages import Files, closed, container, passes, ran

DRAIN = Drain("uid-w-1", "w-1", "a test", "operator", outcome="uncommitted")
DRAIN_KEY = KEYS.in_generation(1).drain(DRAIN.pod_uid)


@pytest.fixture(autouse=True)
def _answers_that_are_not_held_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_shim.c10d.launchers, "IDLE_S", 0.1)


@dataclass
class Job:
    """Two pods that trained the first stage in one world, until w-1 was drained and let go."""

    store: MemoryStore
    port: int
    path_1: Path
    port_1: int
    trains: Torchrun
    left: Torchrun
    drained: Pod

    async def knows_closed(self, run_id: str) -> None:
        """Wait until the drained pod's sidecar knows that a run has ended well."""
        await until(lambda: closed(self.drained).get(run_id) == "success")


@asynccontextmanager
async def job(tmp_path: Path) -> AsyncIterator[Job]:
    engine, paths = MemoryEngine(), [tmp_path / name for name in ("a", "b")]
    store = MemoryStore(engine)
    async with AsyncExitStack() as stack:
        pods = [
            await stack.enter_async_context(
                pod(engine, f"w-{at}", unix_path=str(path), kept=Files(), last_call_s=PATIENCE_S)
            )
            for at, path in enumerate(paths)
        ]
        port, port_1 = [await stack.enter_async_context(container(path)) for path in paths]
        for one in (port, port_1):
            assert await told(one, b"train") == b""
        trains = await asyncio.to_thread(Torchrun, port, "10.0.0.1")
        left = await asyncio.to_thread(Torchrun, port_1, "10.0.0.2")
        worlds = await asyncio.gather(*(asyncio.to_thread(one.form) for one in (trains, left)))
        assert [world.size for world in worlds] == [2, 2]
        await store.txn([], [Put(DRAIN_KEY, DRAIN.to_json())])
        assert (await asyncio.to_thread(trains.form)).size == 1
        yield Job(store, port, paths[1], port_1, trains, left, pods[1])


async def told(port: int, line: bytes) -> bytes | int | None:
    """Ask whether a torchrun is to start; return the answer."""
    async with connected(port) as asking:
        return await asking.ask(wire.CompareSet(wire.STAGE + b"digits", b"", line))


async def settled(port: int, line: bytes) -> bool:
    """Ask as often as one is told to; return whether the stage is passed over."""
    async with asyncio.timeout(PATIENCE_S):
        while (answer := await told(port, line)) == wire.AGAIN:
            continue
    return answer == wire.PASSED


async def test_its_container_goes_on_to_the_next_stage_and_ends_well_with_it(
    tmp_path: Path,
) -> None:
    async with job(tmp_path) as one:
        await asyncio.to_thread(one.trains.end_well)
        await one.knows_closed("digits")
        await asyncio.to_thread(one.left.end_well)
        assert not await passes(one.port, b"evaluate")
        evaluating = asyncio.create_task(ran(one.port))
        passing = asyncio.create_task(settled(one.port_1, b"evaluate"))
        assert await evaluating == 1
        assert await passing
        assert closed(one.drained) == {"digits": "success", "digits (stage 2)": "success"}


async def test_its_container_that_is_started_again_starts_nothing_and_ends_well_with_the_stages(
    tmp_path: Path,
) -> None:
    async with job(tmp_path) as one:
        await asyncio.to_thread(one.left.end)
        async with container(one.path_1) as again:
            assert await told(again, b"train") == wire.AGAIN
            passing = asyncio.create_task(settled(again, b"train"))
            await asyncio.to_thread(one.trains.end_well)
            assert await passing
            assert await told(again, b"evaluate") == wire.AGAIN
            assert not await passes(one.port, b"evaluate")
            passing = asyncio.create_task(settled(again, b"evaluate"))
            assert await ran(one.port) == 1
            assert await passing


async def test_its_torchrun_starts_once_the_drain_is_taken_back(tmp_path: Path) -> None:
    async with job(tmp_path) as one:
        await asyncio.to_thread(one.left.end)
        async with container(one.path_1) as again:
            assert await told(again, b"train") == wire.AGAIN
            await one.store.txn([], [Delete(DRAIN_KEY)])
            assert not await settled(again, b"train")
            back = await asyncio.to_thread(Torchrun, again, "10.0.0.2")
            forming = asyncio.create_task(asyncio.to_thread(back.form))
            assert (await asyncio.to_thread(one.trains.form)).size == 2
            assert (await forming).size == 2
