# SPDX-License-Identifier: Apache-2.0
"""A pod whose disk hangs cannot vote on a save: newcomers wait for a later attempt, for minutes.

The script of these pods saves only when it is asked to.
"""

from __future__ import annotations

import asyncio
import math

import pytest

from rdzv.drain import decision
from tests.support.sidecars.drains import Job, job

pytestmark = pytest.mark.virtual


async def hangs_for_three_attempts(one: Job) -> None:
    """Break the disk of b, let c ask for a place, and wait until three votes were missed."""
    one.pods["b"].run_dir.broken = True
    await one.add("c")
    await one.ask("c")
    await one.until(lambda: one.commit.failures == 3)
    assert one.commit.mute == ("b",)


async def all_have_saved(one: Job) -> None:
    one.pods["b"].run_dir.broken = False
    await one.until(lambda: one.commit.admitted or one.commit.refused)
    assert (one.commit.admitted, one.commit.refused, one.commit.mute) == (True, False, ())


async def test_i10_a_disk_that_hung_for_three_attempts_costs_no_step() -> None:
    async with job("ab", trains="ab") as one:
        await hangs_for_three_attempts(one)
        await all_have_saved(one)


async def test_planted_attempts_that_end_after_the_third_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with job("ab", trains="ab") as one:
        await hangs_for_three_attempts(one)
        monkeypatch.setattr(decision, "_pause_s", lambda *_: math.inf)
        with pytest.raises(AssertionError, match="the store stays at"):
            await all_have_saved(one)


async def test_i11_a_disk_that_hangs_on_keeps_a_newcomer_out_for_ten_minutes() -> None:
    async with job("ab", trains="ab") as one:
        await hangs_for_three_attempts(one)
        began_s = one.clock()
        while not one.commit.refused:
            await asyncio.sleep(1)
            assert one.clock() - began_s < 600
        assert one.commit.mute == ("b",)
        assert "newcomers join without a save" in one.commit.reason
