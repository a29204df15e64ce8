# SPDX-License-Identifier: Apache-2.0
"""The ranks that torch's own handlers are handed: blocks together, and kept by who stays."""

from __future__ import annotations

import pytest

pytest.importorskip("torch.distributed", reason="the handlers are torch's")

from launcher_shim.c10d.rounds.inputs import RoundPolicy
from tests.support.sidecars.rendezvous import Job, job

pytestmark = pytest.mark.virtual

EIGHT = RoundPolicy(7, 8, last_call_s=0.5, first_call_s=60.0, confirm_s=0.5, hold_s=0.2)


async def ranks(one: Job, names: str) -> str:
    """Wait until ``names`` are the world; return them by the rank that torch has told them."""
    await one.world(names)
    told = {world.rank: name for name in names if (world := one.torchruns[name].world)}
    return "".join(told[rank] for rank in range(len(names)))


async def test_blocks_that_addresses_mix_have_one_run_of_ranks_each() -> None:
    # Addresses go by name. One of the first block dies; what comes for it has the last address.
    topologies = {**dict.fromkeys("acegi", "one/r1"), **dict.fromkeys("bdfh", "two/r1")}
    async with job(EIGHT, world="abcdefgh", topologies=topologies) as one:
        assert await ranks(one, "abcdefgh") == "acegbdfh"
        spare = await one.node("i")
        await one.until(lambda: spare.wire.agent.claim.parked)
        one.torchruns["c"].kill()
        assert await ranks(one, "abdefghi") == "aiegbdfh"


async def test_where_nothing_is_known_who_stays_keeps_its_rank() -> None:
    async with job(EIGHT, world="bcdefghi") as one:
        assert await ranks(one, "bcdefghi") == "bcdefghi"
        # By its address it would be rank 0, and all ranks up to that of the dead one would move.
        spare = await one.node("a")
        await one.until(lambda: spare.wire.agent.claim.parked)
        one.torchruns["f"].kill()
        assert await ranks(one, "abcdeghi") == "bcdeaghi"
