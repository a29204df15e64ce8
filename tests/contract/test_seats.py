# SPDX-License-Identifier: Apache-2.0
"""Places go to who can train, by torch's own handlers: spares, and launchers that never come."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch.distributed", reason="the handlers are torch's")

from launcher_shim.c10d.rounds.inputs import RoundPolicy
from tests.support.sidecars.jobs import SlowAnswers
from tests.support.sidecars.rendezvous import job

pytestmark = pytest.mark.virtual

QUICK = RoundPolicy(
    3, 3, last_call_s=0.5, first_call_s=60.0, confirm_s=0.5, return_s=1.0, hold_s=0.2
)


async def test_a_spare_has_the_place_of_a_torchrun_that_never_comes() -> None:
    async with job(QUICK) as one:
        await one.node("a")
        await one.sidecar("b")
        await one.node("c")
        await one.node("d")
        await one.world("acd")
        late = one.torchrun("b")
        await one.until(lambda: late.wire.agent.claim.parked)
        assert len(one.torchruns["a"].worlds) == 1


@pytest.mark.parametrize("least", [2, 3])
async def test_a_spare_has_the_place_of_a_torchrun_that_was_killed(least: int) -> None:
    async with job(replace(QUICK, min_nodes=least), world="abc") as one:
        spare = await one.node("d")
        await one.until(lambda: spare.wire.agent.claim.parked)
        one.torchruns["b"].kill()
        await one.world("acd")


@pytest.mark.parametrize("asks", [False, True])
async def test_an_older_member_that_comes_back_takes_no_place_from_one_that_trains(
    asks: bool,
) -> None:
    async with job(replace(QUICK, min_nodes=2, max_nodes=2), ttl_s=3, world="ab") as one:
        spare = await one.node("c")
        await one.until(lambda: spare.wire.agent.claim.parked)
        one.sidecars["a"].cut.cut()
        await one.world("bc")
        older = one.torchruns["a"]
        if not asks:
            older.kill()
        one.sidecars["a"].cut.mend()
        here = one.sidecars["b"].job
        await one.until(lambda: "a" in here.snapshot().members)
        if asks:
            await one.until(lambda: older.wire.agent.claim.parked)
        before = one.torchruns["b"].world
        one.torchruns["b"].order("rejoin")
        await one.until(lambda: one.torchruns["b"].world is not before)
        await one.world("bc")
        assert len(older.worlds) == 1


async def test_the_youngest_leave_a_world_that_becomes_smaller() -> None:
    policy = replace(QUICK, min_nodes=1, max_nodes=4, last_call_s=5.0)
    async with job(policy, world="abcd") as one:
        last = one.torchruns["b"]
        last.can_stop.clear()
        one.form_by(replace(policy, max_nodes=2))
        await one.tell()
        await one.until(lambda: all(one.torchruns[name].restarts for name in "acd"))
        # The world is over once it has left, a moment before it asks for the next.
        one.sidecars["b"].store.faults = SlowAnswers(0.3)
        last.can_stop.set()
        await one.world("ab")
        await one.until(lambda: one.torchruns["c"].wire.agent.claim.parked)
