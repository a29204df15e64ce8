# SPDX-License-Identifier: Apache-2.0
"""A drain that was cancelled, and whose first write lands once more: late, from the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from agent.drain.notice import Notice
from agent.drain.own import OwnDrain
from agent.rundir.files import RunDir
from rdzv.drain.transactions import cancel, first_write
from rdzv.reconcile import Kernel
from rdzv.records.drain import Commit, Drain
from rdzv.store import Compare, Operation, Put
from rdzv.store.memory.client import MemoryEngine
from tests.support.clocks.virtual import now
from tests.support.sidecars.jobs import KEYS, client
from tests.support.sidecars.registrars import LONG_TTL_S, member_of

pytestmark = pytest.mark.virtual

HERE = KEYS.in_generation(1)


@pytest.mark.parametrize("how", ["cancelled", "cancelled in a hold", "outlived"])
async def test_a_write_that_lands_after_the_drain_is_over_drains_nobody(
    tmp_path: Path, how: str
) -> None:
    now_s = 0.0
    async with client(MemoryEngine(now)) as one, member_of(one, lease_ttl_s=LONG_TTL_S) as member:

        async def written(compares: Sequence[Compare], operations: Sequence[Operation]) -> bool:
            result = await one.store.txn(compares, operations)
            await one.mirror.reached(result.revision)
            return result.succeeded

        kernel = Kernel(one, member.fence, member.registered.wait, now, Random(1))
        own = OwnDrain(
            *(kernel, RunDir(str(tmp_path)), member.identity), grace_s=30.0, boot_s=lambda: now_s
        )
        own.notify(Notice("prestop" if how == "outlived" else "control", "test", 20.0))
        sent = own._writes(one.membership.snapshot(), None)
        assert sent is not None
        assert await written(*sent)
        (drain,) = one.membership.snapshot().drains.values()
        if how == "outlived":
            now_s = 100.0
            expired = replace(drain, outcome="expired")
            await written([], [Put(HERE.drain(drain.pod_uid), expired.to_json())])
            snapshot = one.membership.snapshot()
            over = own._writes(snapshot, snapshot.drains[drain.pod_uid])
        else:
            if how == "cancelled in a hold":
                await written([], [Put(HERE.commit, Commit(1, phase="hold").to_json())])
            cancelled = cancel(KEYS, one.membership.snapshot(), drain.pod_uid)
            over = None if isinstance(cancelled, str) else cancelled
        assert over is not None
        assert await written(*over)
        assert not await written(*sent)


async def test_drains_at_once_do_not_make_each_other_s_first_writes_fail(tmp_path: Path) -> None:
    async with client(MemoryEngine(now)) as one, member_of(one, lease_ttl_s=LONG_TTL_S) as member:
        snapshot = one.membership.snapshot()
        drain = Drain(member.identity.pod_uid, "w-0", "test", "control", 20.0)
        sent = first_write(KEYS, snapshot, drain)
        # The hold of another's drain takes in whoever comes.
        await one.store.txn([], [Put(HERE.commit, Commit(1, phase="hold").to_json())])
        assert (await one.store.txn(*sent)).succeeded
