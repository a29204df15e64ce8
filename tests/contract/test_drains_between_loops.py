# SPDX-License-Identifier: Apache-2.0
"""Drains and joins that come while ranks are between two loops, as for an evaluation."""

from __future__ import annotations

from functools import partial

import pytest

from rdzv.drain.transactions import cancel
from rdzv.store.memory.client import MemoryStore
from tests.support.sidecars.drains import Job, job
from tests.support.sidecars.jobs import KEYS
from tests.support.sidecars.ranks import Loop

pytestmark = pytest.mark.virtual

STEPS = 5


async def evaluating(one: Job, names: str) -> None:
    """Form a world and wait until all of it evaluates."""
    await one.form(names, Loop(steps_a_loop=STEPS))
    for name in names:
        await one.pods[name].soon(partial(one.pods[name].steps, "evaluate"))


async def stands_still(one: Job) -> None:
    """Let time pass in which nobody may be let go or in."""
    began = one.clock()
    await one.pods["a"].soon(lambda: one.clock() - began > 0.5)


@pytest.mark.parametrize("comes", [False, True], ids=["a leaver", "a newcomer"])
async def test_who_comes_or_goes_waits_for_the_next_loop_and_costs_no_step(comes: bool) -> None:
    async with job("abc") as one:
        await evaluating(one, "ab")
        if comes:
            await one.ask("c")
        else:
            one.pods["b"].notice("sigterm", 120)
        await one.until(one.phase_is("commit"))
        await stands_still(one)
        assert (one.commit.phase, one.commit.admitted, one.commit.granted) == ("commit", False, ())
        one.evaluated.set()
        await one.until(lambda: one.commit.admitted or one.commit.granted == ("uid-b",))
        assert one.done == [(0, STEPS + 1)]


async def test_at_its_deadline_it_goes_though_all_still_evaluate() -> None:
    async with job("ab") as one:
        await evaluating(one, "ab")
        outcome = await one.pods["b"].notice("sigterm", 3).release()
        assert (outcome, one.done) == ("expired", [])


async def test_a_cancelled_drain_leaves_the_next_one_its_save() -> None:
    async with job("abc") as one:
        await evaluating(one, "ab")
        client = one.pods["b"].notice("control", 120)
        await one.until(one.phase_is("commit"))
        planned = cancel(KEYS, one.snapshot, "uid-b")
        assert not isinstance(planned, str), planned
        assert (await MemoryStore(one.engine).txn(*planned)).succeeded
        assert (await client.last()).name == "cancelled"
        one.evaluated.set()
        await one.goes_on()
        assert await one.pods["a"].notice("sigterm", 120).release() == "committed"
