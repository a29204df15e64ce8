# SPDX-License-Identifier: Apache-2.0
"""A drain that was cancelled, and whose first write lands once more: late, from the network."""

from __future__ import annotations

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
from rdzv.store import Put
from rdzv.store.memory.client import MemoryEngine
from tests.support.clocks.virtual import now
from tests.support.sidecars.jobs import KEYS, client
from tests.support.sidecars.registrars import LONG_TTL_S, member_of

pytestmark = pytest.mark.virtual

HERE = KEYS.in_generation(1)


@pytest.mark.parametrize("commits", [0, 1], ids=["before any commit", "in a hold"])
async def test_a_write_that_lands_after_the_cancellation_drains_nobody(
    tmp_path: Path, commits: int
) -> None:
    async with client(MemoryEngine(now)) as one, member_of(one, lease_ttl_s=LONG_TTL_S) as member:
        kernel = Kernel(one, member.fence, member.registered.wait, now, Random(1))
        run_dir = RunDir(str(tmp_path))
        own = OwnDrain(kernel, run_dir, member.identity, grace_s=30.0, boot_s=now)
        own.notify(Notice("control", "test", 20.0))
        sent = own._writes(one.membership.snapshot(), None)
        assert sent is not None
        assert (await one.store.txn(*sent)).succeeded
        holds = [Put(HERE.commit, Commit(1, phase="hold").to_json())] * commits
        held = await one.store.txn([], holds)
        await one.mirror.reached(held.revision)
        cancelled = cancel(KEYS, one.membership.snapshot(), member.identity.pod_uid)
        assert not isinstance(cancelled, str)
        assert (await one.store.txn(*cancelled)).succeeded
        assert not (await one.store.txn(*sent)).succeeded


async def test_a_write_that_lands_after_the_pod_has_outlived_its_drain_drains_nobody(
    tmp_path: Path,
) -> None:
    async with client(MemoryEngine(now)) as one, member_of(one, lease_ttl_s=LONG_TTL_S) as member:
        kernel = Kernel(one, member.fence, member.registered.wait, now, Random(1))
        now_s = 0.0
        run_dir = RunDir(str(tmp_path))
        own = OwnDrain(kernel, run_dir, member.identity, grace_s=30.0, boot_s=lambda: now_s)
        own.notify(Notice("prestop", "test", 20.0))
        sent = own._writes(one.membership.snapshot(), None)
        assert sent is not None
        assert (await one.store.txn(*sent)).succeeded
        drain = Drain(member.identity.pod_uid, "w-0", "test", "prestop", 20.0)
        ended = Put(HERE.drain(drain.pod_uid), replace(drain, outcome="expired").to_json())
        await one.mirror.reached((await one.store.txn([], [ended])).revision)
        now_s = 100.0
        snapshot = one.membership.snapshot()
        cancelled = own._writes(snapshot, snapshot.drains[drain.pod_uid])
        assert cancelled is not None
        assert (await one.store.txn(*cancelled)).succeeded
        assert not (await one.store.txn(*sent)).succeeded


async def test_drains_at_once_do_not_make_each_other_s_first_writes_fail(tmp_path: Path) -> None:
    async with client(MemoryEngine(now)) as one, member_of(one, lease_ttl_s=LONG_TTL_S) as member:
        snapshot = one.membership.snapshot()
        drain = Drain(member.identity.pod_uid, "w-0", "test", "control", 20.0)
        sent = first_write(KEYS, snapshot, drain)
        # The hold of another's drain takes in whoever comes.
        await one.store.txn([], [Put(HERE.commit, Commit(1, phase="hold").to_json())])
        assert (await one.store.txn(*sent)).succeeded
