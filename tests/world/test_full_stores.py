# SPDX-License-Identifier: Apache-2.0
"""Sidecars that start, and start again, while the store refuses all writes for want of space."""

from __future__ import annotations

import pytest

from rdzv.errors import StoreFull, StoreRefused
from rdzv.store.memory.engine import NO_SPACE
from tests.simulation.nodes import LEASE_TTL_S
from tests.world.world import World

WITHOUT_TORCHRUN = {"trains": False}
DENIED = StoreRefused("permission denied")


async def test_i5_a_restarted_sidecar_renews_its_former_lease_until_a_full_store_has_room(
    world: World,
) -> None:
    job = await world.job("ab", plot=WITHOUT_TORCHRUN)
    before = job.snapshot.members["a"]
    job.engine.fill(0)
    job["a"].restart()
    await job.passes(20 * LEASE_TTL_S)
    assert job.snapshot.members["a"] == before
    assert job["a"].upholds
    # A kubelet ends one whose start probe fails, and starts it again ever later.
    assert job["a"].not_ready is None
    job.engine.make_room()
    await job.until(lambda: job.snapshot.members["a"] != before)
    # What the former sidecar sent changes nothing.
    now = job.snapshot.members["a"]
    assert (now.incarnation > before.incarnation, now.lease != before.lease) == (True, True)
    # What is not written again yet hangs on the former lease, which is left to expire.
    assert before.lease in job.engine.leases
    await job.passes(2 * LEASE_TTL_S)
    assert before.lease not in job.engine.leases
    assert not job["a"].upholds


async def test_i6_a_pod_that_takes_a_name_over_renews_no_lease_and_says_what_keeps_it_out(
    world: World,
) -> None:
    job = await world.job("ab", plot=WITHOUT_TORCHRUN)
    job.engine.fill(0)
    job["a"].die()
    job.add("a")
    await job.passes(2 * LEASE_TTL_S)
    assert job.snapshot.members.keys() == {"b"}
    assert job["a"].not_ready == f"not registered yet: {NO_SPACE}"
    job.engine.make_room()
    await job.passes(LEASE_TTL_S)
    assert job["a"].not_ready is None


@pytest.mark.parametrize("full_first", [False, True])
async def test_a_sidecar_that_is_refused_alone_lets_its_former_lease_end(
    world: World, full_first: bool
) -> None:
    # The others go on without it: they have a store, and it cannot act.
    job = await world.job("ab", plot=WITHOUT_TORCHRUN)
    job["a"].restart()
    job["a"].refuse_writes(error=StoreFull(NO_SPACE) if full_first else DENIED)
    await job.passes(2 * LEASE_TTL_S)
    assert ("a" in job.snapshot.members) == full_first
    job["a"].refuse_writes(error=DENIED)
    await job.passes(4 * LEASE_TTL_S)
    assert job.snapshot.members.keys() == {"b"}


async def test_a_lease_that_ended_before_the_sidecar_was_back_is_not_renewed(world: World) -> None:
    job = await world.job("ab", plot=WITHOUT_TORCHRUN)
    job["a"].crash()
    job.engine.fill(0)
    await job.passes(2 * LEASE_TTL_S)
    job["a"].start()
    await job.passes(4 * LEASE_TTL_S)
    assert not job["a"].upholds
    assert job.snapshot.members.keys() == {"b"}
    job.engine.make_room()
    await job.until(lambda: "a" in job.snapshot.members)
