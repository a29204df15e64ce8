# SPDX-License-Identifier: Apache-2.0
"""The wait for the first of several things."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import Any


async def first_of(*waits: Awaitable[Any], timeout_s: float | None = None) -> Any:
    """Wait until one of ``waits`` has ended, and cancel the others; return its result.

    None if ``timeout_s`` has passed before; None or infinite: no limit. Raises what one that has
    ended has raised.
    """
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(
            tasks,
            timeout=None if timeout_s == math.inf else timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        return next(iter([task.result() for task in tasks if task in done]), None)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
