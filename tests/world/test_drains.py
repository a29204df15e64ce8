# SPDX-License-Identifier: Apache-2.0
"""Drains from the notice to the release, beside whatever else happens."""

from __future__ import annotations

from tests.support.world import World


async def test_i1_two_leave_while_one_joins(world: World) -> None:
    job = await world.job("abc", least=2)
    await job.trains(20)
    job["a"].sigterm(grace_s=30)
    job["b"].sigterm(grace_s=30)
    job.add("d")
    await job.settles()
    assert job.lost == 0
    assert job.world == "cd"
