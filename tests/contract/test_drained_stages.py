# SPDX-License-Identifier: Apache-2.0
"""A pod that was drained by hand and left alone, while the job goes through its stages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

pytest.importorskip("torch.distributed", reason="the handlers are torch's")

from launcher_shim.tcpstore import wire
from rdzv.records.drain import Drain
from rdzv.store import Delete, Put
from rdzv.store.memory.client import transact
from tests.support.sidecars.rendezvous import ALONE, HERE, Container, Job, job

pytestmark = pytest.mark.virtual

DRAIN = Drain("uid-b", "b", "a test", "operator", outcome="uncommitted")
DRAIN_KEY = HERE.drain(DRAIN.pod_uid)


@asynccontextmanager
async def two_pods() -> AsyncIterator[tuple[Job, Container, Container]]:
    """They trained the first stage in one world, until b was drained and released."""
    async with job(replace(ALONE, last_call_s=30.0), sidecars="ab") as one:
        containers = one.container("a"), one.container("b")
        for container in containers:
            assert await one.asks(container, b"train") == b""
            one.torchrun(container.pod, container=container)
        await one.world("ab")
        transact(one.engine, [], [Put(DRAIN_KEY, DRAIN.to_json())])
        await one.world("a")
        yield one, *containers


async def ends_well(one: Job, name: str) -> None:
    one.torchruns[name].order("finish")
    await one.until(lambda: one.torchruns[name].ended)
    assert one.torchruns[name].failure is None


async def settled(one: Job, container: Container, line: bytes) -> bool:
    """Ask as often as one is told to; return whether the stage is passed over."""
    while (answer := await one.asks(container, line)) == wire.AGAIN:
        continue
    return answer == wire.PASSED


async def test_its_container_goes_on_to_the_next_stage_and_ends_well_with_it() -> None:
    async with two_pods() as (one, stays, drained):
        await ends_well(one, "a")
        await one.until(lambda: one.closed() == {"digits": "success"})
        await ends_well(one, "b")
        assert not await one.passes(stays, b"evaluate")
        passing = asyncio.create_task(settled(one, drained, b"evaluate"))
        assert await one.ran(stays) == [1]
        assert await passing
        assert one.closed() == {"digits": "success", "digits (stage 2)": "success"}


async def test_its_container_started_again_starts_nothing_and_ends_well_with_the_stages() -> None:
    async with two_pods() as (one, stays, _):
        one.torchruns["b"].kill()
        again = one.container("b")
        assert await one.asks(again, b"train") == wire.AGAIN
        passing = asyncio.create_task(settled(one, again, b"train"))
        await ends_well(one, "a")
        assert await passing
        assert await one.asks(again, b"evaluate") == wire.AGAIN
        assert not await one.passes(stays, b"evaluate")
        passing = asyncio.create_task(settled(one, again, b"evaluate"))
        assert await one.ran(stays) == [1]
        assert await passing


async def test_its_torchrun_starts_once_the_drain_is_taken_back() -> None:
    async with two_pods() as (one, _, __):
        one.torchruns["b"].kill()
        again = one.container("b")
        assert await one.asks(again, b"train") == wire.AGAIN
        transact(one.engine, [], [Delete(DRAIN_KEY)])
        assert not await settled(one, again, b"train")
        one.torchrun("b", container=again)
        await one.world("ab")
