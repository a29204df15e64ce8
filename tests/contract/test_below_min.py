# SPDX-License-Identifier: Apache-2.0
"""Torchruns that are too few wait for as long as it takes, by torch's own handlers."""

from __future__ import annotations

import pytest

pytest.importorskip("torch.distributed", reason="the handlers are torch's")

from launcher_shim.c10d.rounds.inputs import RoundPolicy
from tests.support.sidecars.rendezvous import job

pytestmark = pytest.mark.virtual

QUICK = RoundPolicy(3, 3, last_call_s=0.5, first_call_s=30.0, confirm_s=0.5, hold_s=0.2, park_s=0.2)
JOIN_S = 5.0


async def test_too_few_outlive_their_join_time_out_and_form_a_world_once_they_are_enough() -> None:
    async with job(QUICK) as one:
        waiting = [await one.node(name, join_s=JOIN_S) for name in "ab"]
        began = await one.passed(JOIN_S + 2)
        assert [torchrun.failure for torchrun in waiting] == [None, None]
        # One a second would be a compare-and-set for each look.
        assert all(torchrun.compare_sets(began) <= 5 for torchrun in waiting)
        await one.node("c")
        await one.world("abc")


async def test_one_that_is_left_alone_waits_for_others_to_come_back() -> None:
    async with job(QUICK) as one:
        alone = await one.node("a", join_s=JOIN_S)
        await one.until(lambda: alone.wire.agent.claim.parked)
        for name in "bc":
            await one.node(name)
        await one.world("abc")
        for name in "bc":
            one.torchruns[name].kill()
        await one.until(lambda: alone.restarts == 1 and alone.wire.agent.claim.parked)
        await one.passed(JOIN_S + 1)
        assert alone.failure is None
        for name in "bc":
            one.torchrun(name)
        await one.world("abc")
