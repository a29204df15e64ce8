# SPDX-License-Identifier: Apache-2.0
"""A clock for the memory engine that does not count while this process stands still.

On a busy machine a healthy member may renew nothing for longer than its lease lives, because
nothing of this process runs: by this clock a lease ends for want of a renewal alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic

TICK_S = 0.02

MOST_PER_TICK_S = 0.1
"""More than this since the last tick is time in which the loop did not get to its turns."""


@asynccontextmanager
async def awake_clock() -> AsyncIterator[Callable[[], float]]:
    """Give ``MemoryEngine`` its clock; it stops with the block."""
    now_s = monotonic()

    async def tick() -> None:
        nonlocal now_s
        ticked_s = monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            before_s, ticked_s = ticked_s, monotonic()
            now_s += min(ticked_s - before_s, MOST_PER_TICK_S)

    ticking = asyncio.create_task(tick(), name="awake clock")
    try:
        yield lambda: now_s
    finally:
        ticking.cancel()
        await asyncio.wait({ticking})
