# SPDX-License-Identifier: Apache-2.0
"""A job that cannot start, by torch's own handlers: no torchrun gives up while it waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch.distributed", reason="the handlers are torch's")

from launcher_shim.c10d.rounds.decision import FIRST_S, FREE_STARTS, LONGEST_S
from rdzv.records.history import HistoryEntry
from rdzv.records.troubles import Failure
from rdzv.store import Put
from rdzv.store.interface import Interval
from rdzv.store.memory.client import MemoryStore
from tests.support.clocks.virtual import now
from tests.support.sidecars.jobs import KEYS
from tests.support.sidecars.rendezvous import QUICK, RUN_ID, Job, job

pytestmark = pytest.mark.virtual

POLICY = replace(QUICK, min_nodes=2, max_nodes=3, first_call_s=1.0)
SOON_S = 15.0
"""A world that waits for nothing forms in less."""


async def told(one: Job, names: str, number: int) -> None:
    """Put on record that the workers of a world have failed."""
    store, here = MemoryStore(one.engine), KEYS.in_generation(1)
    for name in names:
        failure = Failure(name, RUN_ID, number, 0, "ImportError", "no module", "train.py:1")
        lease = one.sidecars[name].registrar.lease_id
        await store.txn([], [Put(here.failure(name), failure.to_json(), lease or 0)])


async def fails(one: Job, names: str = "ab", *, on_record: bool = True) -> None:
    """Let the workers of the present world fail alike, as a script that cannot be imported."""
    number = one.sidecars["a"].rendezvous.round.number
    await told(one, names if on_record else "", number)
    for name in names:
        one.torchruns[name].order("rejoin")
    await one.until(lambda: one.sidecars["a"].rendezvous.round.number > number)


async def waits(one: Job, names: str = "ab") -> float:
    """Return how long the next world of ``names`` takes to form."""
    began_s, number = now(), one.sidecars["a"].rendezvous.round.number

    def formed() -> bool:
        worlds = [one.torchruns[name].world for name in names]
        return all(w is not None and (w.round, w.size) == (number, len(names)) for w in worlds)

    await one.until(formed, 2 * LONGEST_S)
    return now() - began_s


async def failed(one: Job, times: int) -> None:
    """Let a world fail so often, each after its wait."""
    for _ in range(times):
        await fails(one)
        await waits(one)


async def test_the_next_try_waits_longer_each_time_and_no_torchrun_gives_up() -> None:
    async with job(POLICY, world="ab") as one:
        took_s = []
        for _ in range(FREE_STARTS + 6):
            await fails(one)
            took_s.append(await waits(one))
        assert max(took_s[: FREE_STARTS - 1]) < SOON_S
        expected = [min(LONGEST_S, FIRST_S * 2**n) for n in range(7)]
        for seconds, least_s in zip(took_s[FREE_STARTS - 1 :], expected, strict=True):
            assert least_s - 2 <= seconds < least_s + SOON_S
        assert not any(one.torchruns[name].ended for name in "ab")


async def test_a_wait_is_in_the_history_once_whoever_is_seen_to_fail_last() -> None:
    async with job(POLICY, world="ab") as one:
        await failed(one, FREE_STARTS + 1)
        here = one.sidecars["a"].rendezvous
        number = here.round.number
        await fails(one, on_record=False)
        await one.passed(SOON_S)
        for name in "ba":
            await told(one, name, number)
            await one.passed(SOON_S)
        entries = map(HistoryEntry.from_kv, one.engine.read(Interval.of(KEYS.history, prefix=True)))
        waits = [entry.details["round"] for entry in entries if entry.what == "wait"]
        assert waits[-1] == here.round.number
        assert len(set(waits)) == len(waits), waits


async def test_a_new_pod_ends_the_wait_and_so_does_a_change_of_the_job() -> None:
    async with job(POLICY, world="ab") as one:
        await failed(one, FREE_STARTS + 3)
        await fails(one)
        await one.passed(SOON_S)
        record = one.sidecars["a"].job.snapshot().job
        assert record is not None
        await MemoryStore(one.engine).txn([], [Put(KEYS.job, record.to_json())])
        assert await waits(one) < SOON_S
        await fails(one)
        await one.passed(SOON_S)
        await one.node("c")
        assert await waits(one, "abc") < SOON_S


async def test_there_is_no_wait_where_the_others_could_train_without_it() -> None:
    async with job(replace(POLICY, min_nodes=1), world="ab") as one:
        for _ in range(FREE_STARTS + 2):
            await fails(one, "a")
            assert await waits(one) < SOON_S


async def test_a_world_that_made_a_step_ends_the_row() -> None:
    async with job(POLICY, world="ab") as one:
        await failed(one, FREE_STARTS + 1)
        here = one.sidecars["a"].rendezvous
        first = one.sidecars[here.round.frozen[0].member].rendezvous
        await one.until(lambda: first.ranks_at(first.round.number, 1) or True)
        await one.until(lambda: here.round.progress == "steps")
        await fails(one)
        assert here.round.failed_starts == 0
        assert await waits(one) < SOON_S
