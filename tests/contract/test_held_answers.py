# SPDX-License-Identifier: Apache-2.0
"""Looks that are held until there is something to see, in the sidecars of one world."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from launcher_shim.c10d.agent import HELD_LOOK_S, TorchAgent, connect
from launcher_shim.c10d.rounds.views import HELD_MAX_S
from rdzv.store.memory.client import MemoryEngine
from tests.support.clocks.virtual import now
from tests.support.sidecars.runs import LISTED, Client, Pod, complete, pod, until, world
from tests.support.store.cut import Cut

pytestmark = pytest.mark.virtual

SOON_S = 0.2


def drain(pods: list[Pod], *leaving: str) -> None:
    """Let all know that these have got a notice."""
    for one in pods:
        one.membership = replace(LISTED, leaving=frozenset(leaving))


@asynccontextmanager
async def looking() -> AsyncIterator[tuple[list[Pod], list[Client], asyncio.Task[None]]]:
    """A world, and the look of its first torchrun beside a drain of the third."""
    async with world(MemoryEngine(now), None, None, None) as (pods, clients):
        drain(pods, "c")
        assert clients[0].agent.is_held()
        look = asyncio.create_task(clients[0].agent.hold())
        await asyncio.sleep(SOON_S)
        assert not look.done()
        yield pods, clients, look


async def took(look: asyncio.Task[None]) -> float:
    began_s = now()
    await look
    return now() - began_s


async def test_a_look_ends_as_soon_as_the_world_does() -> None:
    async with looking() as (_, clients, look):
        assert not clients[0].state.wait_list
        clients[2].agent.closed()
        assert await took(look) < SOON_S
        assert clients[0].get().wait_list
        assert not clients[0].agent.is_held()


async def test_a_look_ends_without_a_change_after_its_limit() -> None:
    async with looking() as (_, clients, look):
        assert await took(look) == pytest.approx(HELD_MAX_S - SOON_S)
        assert complete(clients[0])


async def test_a_look_ends_with_a_notice_of_its_own_pod() -> None:
    async with looking() as (pods, _, look):
        drain(pods, "a", "c")
        assert await took(look) <= HELD_LOOK_S


async def test_no_look_is_held_while_the_store_is_away() -> None:
    cut = Cut()
    async with world(MemoryEngine(now), cut, None, None) as (pods, clients):
        drain(pods, "c")
        cut.cut()
        await until(lambda: not pods[0].mirror.healthy(now()))
        assert not clients[0].agent.is_held()


# -- what happens between a look and the wait that follows it is not missed


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
