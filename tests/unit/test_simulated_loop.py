# SPDX-License-Identifier: Apache-2.0
"""The loop of the simulation, where a story breaks at an awkward moment."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from tests.support.clocks.virtual import SimulatedLoop


def test_a_story_that_breaks_in_the_turn_in_which_it_ends_is_unwound_all_the_same() -> None:
    """The loop was asked to stop for its end, and never came to it."""
    loop = SimulatedLoop(Random(0))
    unwound = []

    async def pod() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            unwound.append(True)

    async def story() -> None:
        loop.create_task(pod())
        await asyncio.sleep(1)

    ending = loop.create_task(story())

    def broken() -> None:
        if ending.done():
            raise AssertionError("broken")

    loop.after_turn = broken
    with pytest.raises(AssertionError, match="broken"):
        loop.run_until_complete(ending)
    loop.end()
    assert unwound == [True]
