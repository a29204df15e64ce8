# SPDX-License-Identifier: Apache-2.0
"""The fixture of scenarios, and the event loop that each runs in."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Generator, Mapping

import pytest

from tests.simulation.simulation import alone
from tests.support.clocks.virtual import ScriptedLoop
from tests.world.world import World

SEEDS = range(int(os.environ.get("MUSTER_TEST_WORLDS", "2")))
"""Each scenario is told in so many orders of turns."""


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every scenario runs in virtual time."""
    return {"virtual": ScriptedLoop}


@pytest.fixture(params=SEEDS)
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """A world in which nothing has happened yet."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ScriptedLoop)
    loop.seed(request.param)
    with alone():
        one = World(loop, request.param)
        try:
            yield one
            if not getattr(request.node, "has_failed", False):
                await one.check()
        finally:
            await one.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a scenario that fails print its timeline."""
    report = yield
    world = getattr(item, "funcargs", {}).get("world")
    if report.failed and isinstance(world, World):
        item.has_failed = True  # type: ignore[attr-defined]
        report.sections.append(("timeline", world.timeline))
    return report
