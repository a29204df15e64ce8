# SPDX-License-Identifier: Apache-2.0
"""The first of several waits ends the others."""

from __future__ import annotations

import asyncio
import math

import pytest

from rdzv.reconcile import first_of

pytestmark = pytest.mark.virtual


async def test_the_first_ends_the_others() -> None:
    ended: list[str] = []

    async def wait(s: float, name: str) -> str:
        try:
            await asyncio.sleep(s)
        finally:
            ended.append(name)
        return name

    assert await first_of(wait(3, "slow"), wait(1, "fast"), timeout_s=math.inf) == "fast"
    assert ended == ["fast", "slow"]
    assert await first_of(wait(3, "slow"), timeout_s=1.0) is None
    assert ended == ["fast", "slow", "slow"]


async def test_a_wait_that_fails_is_no_news() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await first_of(fail(), asyncio.Event().wait())
