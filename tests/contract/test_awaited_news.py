# SPDX-License-Identifier: Apache-2.0
"""What happens between a look and the wait that follows it is not missed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from launcher_shim.c10d.agent import TorchAgent, connect
from rdzv.store.memory.client import MemoryEngine
from tests.support.clocks.virtual import now
from tests.support.sidecars.runs import Client, pod

pytestmark = pytest.mark.virtual


async def test_news_that_comes_before_the_task_that_waits_for_it_has_begun() -> None:
    async with pod(MemoryEngine(now), "a") as one:
        agent = connect(one.rendezvous)
        await Client(agent).join()
        news = one.rendezvous._news
        waiting = asyncio.ensure_future(agent.news())
        one.rendezvous._tell()
        assert news.is_set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert waiting.done()


@pytest.mark.parametrize(
    "comes", [TorchAgent.request_began, TorchAgent.closed], ids=["a request", "the end"]
)
async def test_what_comes_before_the_task_that_waits_for_it_has_begun(
    comes: Callable[[TorchAgent], None],
) -> None:
    async with pod(MemoryEngine(now), "a") as one:
        agent = connect(one.rendezvous)
        waiting = asyncio.ensure_future(agent.stirs())
        comes(agent)
        await waiting
