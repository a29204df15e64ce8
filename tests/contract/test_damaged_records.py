# SPDX-License-Identifier: Apache-2.0
"""torch's own handlers train on while somebody damages the records of their world."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

pytest.importorskip("torch.distributed", reason="the handlers are torch's")

from rdzv.store import Put
from rdzv.store.memory.client import MemoryStore
from tests.support.sidecars.jobs import KEYS
from tests.support.sidecars.rendezvous import QUICK, RUN_ID, job

pytestmark = pytest.mark.virtual

HERE = KEYS.in_generation(1)

RECORDS = {
    "job": KEYS.job,
    "member": HERE.member("b"),
    "node": HERE.run(RUN_ID).node("b"),
    "round": HERE.run(RUN_ID).round,
}

DAMAGE = b"\xff no record"


@pytest.mark.parametrize("order", list(permutations(RECORDS)), ids="-".join)
async def test_i8_in_whatever_order_records_are_damaged_the_world_trains_on(
    order: tuple[str, ...],
) -> None:
    """Only a registered member writes its node record, so b may have to register again first."""
    async with job(replace(QUICK, confirm_s=4.0, return_s=15.0), ttl_s=10.0, world="abc") as one:
        store = MemoryStore(one.engine)
        for name in order:
            await store.txn([], [Put(RECORDS[name], DAMAGE)])
            await one.passed(0.05)
        # Longer than it takes to miss a node, and to form a world without it.
        await one.passed(25.0)
        for name in order:
            (kv,) = (await store.range(RECORDS[name])).kvs
            assert kv.value != DAMAGE, name
        assert [torchrun.restarts for torchrun in one.everyone] == [0, 0, 0]
        await one.node("d")
        await one.world("abcd")
