# SPDX-License-Identifier: Apache-2.0
"""Bounds on time that are asked of the product, and not of a machine that is busy elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import TypeVar

import pytest

T = TypeVar("T")

TICK_S = 0.02

CALM_S = 0.2
"""As late as this the event loop may come to a turn; later, this process stood still."""

ATTEMPTS = 5


def complaints(errors: str, lag_s: float) -> list[str]:
    """The lines of what a command complained of, while the loop was late by ``lag_s`` at worst.

    The store seems silent on a machine that stood still: of that alone nothing is made then.
    """
    lines = [line for line in errors.splitlines() if line]
    if lag_s <= CALM_S:
        return lines
    return [line for line in lines if not line.startswith("the store does not answer")]


@asynccontextmanager
async def loop_lag() -> AsyncIterator[Callable[[], float]]:
    """Measure by how much the event loop has been late at worst, in seconds."""
    worst_s = 0.0
    due_s = monotonic() + TICK_S

    def lag_s() -> float:
        # The turn that is due now may be the late one.
        return max(worst_s, monotonic() - due_s)

    async def tick() -> None:
        nonlocal worst_s, due_s
        while True:
            await asyncio.sleep(max(due_s - monotonic(), 0))
            worst_s = lag_s()
            due_s = monotonic() + TICK_S

    ticking = asyncio.create_task(tick(), name="loop lag")
    try:
        yield lag_s
    finally:
        ticking.cancel()
        await asyncio.wait({ticking})


async def calmly(scenario: Callable[[int], Awaitable[T]]) -> T:
    """Run ``scenario`` with the number of the attempt, which gives it keys of its own.

    Where it fails while this process stood still, the failure says nothing, and it runs again;
    on a calm machine a failure is one.
    """
    last: BaseException | None = None
    for attempt in range(ATTEMPTS):
        async with loop_lag() as lag_s:
            try:
                return await scenario(attempt)
            except (Exception, pytest.fail.Exception) as failure:
                if lag_s() <= CALM_S:
                    raise
                last = failure
    raise AssertionError(
        f"this machine was never calm: {ATTEMPTS} attempts stood still for over {CALM_S} s each"
    ) from last
