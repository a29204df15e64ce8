# SPDX-License-Identifier: Apache-2.0
"""What a sidecar knows of runs that no launcher of its own takes part in."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent.draining.sight import Sight
from agent.rundir import RunDir
from launcher_shim.c10d.kept_stages import KeptStages
from launcher_shim.c10d.nodes import Round, Seat
from rdzv.commit import Commit
from rdzv.store import Put
from rdzv.store.memory import MemoryEngine, MemoryStore
from tests.contract.job_harness import KEYS
from tests.contract.raw_client import DEADLINE_S
from tests.contract.test_endpoint import Pod, pod

HERE = KEYS.in_generation(1)
WORLD = Round(3, complete=True, frozen=(Seat("w-9", "n", 1),))


async def put_round(engine: MemoryEngine, run_id: str, current: Round) -> None:
    put = Put(HERE.run(run_id).round, current.to_json())
    assert (await MemoryStore(engine).txn([], [put])).succeeded


def sight_of(one: Pod, directory: Path) -> Sight:
    return Sight(one.client.membership, one.endpoint, "uid-w-0", RunDir(str(directory)))


async def test_a_sidecar_that_has_just_registered_looks_at_drains_with_the_runs_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = asyncio.Event()

    async def read(self: KeptStages) -> None:
        await answers.wait()

    monkeypatch.setattr(KeptStages, "read", read)
    engine = MemoryEngine()
    await put_round(engine, "digits", WORLD)
    async with pod(engine, "w-0", waits=False) as one, asyncio.timeout(DEADLINE_S):
        looking = asyncio.create_task(sight_of(one, tmp_path).snapshot())
        done, _ = await asyncio.wait([looking], timeout=0.3)
        assert not done
        answers.set()
        seen = await looking
        assert seen.round is not None
        assert seen.round.live


async def test_i3_an_epoch_that_was_seen_stays_used_when_the_store_has_lost_it(
    tmp_path: Path,
) -> None:
    engine = MemoryEngine()
    store = MemoryStore(engine)
    await put_round(engine, "digits", WORLD)
    async with pod(engine, "w-0") as one, asyncio.timeout(DEADLINE_S):
        sight = sight_of(one, tmp_path)
        assert (await sight.snapshot()).used_epoch == 0
        for epoch in (7, 3):
            before = one.client.membership.snapshot()
            await store.txn([], [Put(HERE.commit, Commit(epoch=epoch).to_json())])
            await one.client.membership.changed_from(before)
            seen = await sight.snapshot()
            assert (seen.commit.epoch, seen.used_epoch) == (epoch, 7)
        sight.sent = 9
        assert (await sight.snapshot()).used_epoch == 9
