# SPDX-License-Identifier: Apache-2.0
"""Time that counts: in which the store served, and this process did not stand still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic

TICK_S = 0.1
LATE_S = 0.2
"""As late as this a tick may come."""
SERVED_S = 0.5
"""For no longer than this the store may not have served."""
WAIT_S = 60.0
"""What a busy machine may add: by then a client has had its time in any case."""


async def calm_time(
    seconds: float, served_at_s: Sequence[float], *, enough: Callable[[], bool] = lambda: False
) -> None:
    """Wait until so much of it has passed; ``served_at_s`` grows while the store serves.

    A client that leaves what is broken does so well within it, however busy the machine is; one
    that waits for the end of the fault does not. Once ``enough`` holds, it is over early.
    """
    deadline_s = monotonic() + seconds + WAIT_S
    ticks = round(seconds / TICK_S)
    while ticks > 0 and not enough() and monotonic() < deadline_s:
        began_s = monotonic()
        await asyncio.sleep(TICK_S)
        now_s = monotonic()
        served = bool(served_at_s) and now_s - served_at_s[-1] <= SERVED_S
        ticks -= served and now_s - began_s <= TICK_S + LATE_S
