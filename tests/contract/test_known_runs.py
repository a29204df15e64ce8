# SPDX-License-Identifier: Apache-2.0
"""What a sidecar knows of runs that no launcher of its own takes part in."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.drain.decisions import DrainView
from agent.rundir.files import RunDir
from launcher_shim.c10d.rounds.records import Round, Seat
from launcher_shim.c10d.rounds.stages import KeptStages, round_prefix
from rdzv.drain.decision import decide
from rdzv.drain.inputs import DrainingSnapshot, DrainObservations, DrainPolicy, observe
from rdzv.records.drain import Commit, Drain, Outcome, Vote
from rdzv.records.job import Member
from rdzv.store import Delete, Put
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.sidecars.endpoints import Pod, asks, pod
from tests.support.sidecars.jobs import KEYS
from tests.support.sidecars.raw_client import DEADLINE_S, connected

HERE = KEYS.in_generation(1)
LATER_S = 100.0
"""Long after everything that the tests tell of."""

WORLD = Round(3, complete=True, frozen=(Seat("w-9", "n", 1),))
ENDED = replace(WORLD, finishing=True, closed="success")


async def put_round(engine: MemoryEngine, run_id: str, current: Round) -> int:
    """Write a round as another sidecar does; returns the revision."""
    put = Put(HERE.run(run_id).round, current.to_json())
    return (await MemoryStore(engine).txn([], [put])).revision


def drained(member: str, seconds_left: float | None = None) -> Drain:
    return Drain(f"uid-{member}", member, "evicted", "test", seconds_left, created_revision=1)


def outcomes(
    seen: DrainingSnapshot, drain: Drain, commit: Commit | None = None
) -> dict[str, Outcome]:
    """How a drain would end now, by pod UID; its deadline is near if it has one."""
    me = Member(drain.member, drain.pod_uid, 1, "10.0.0.9", "", "worker", 1, 1, 4)
    membership = replace(
        seen.membership,
        members={**seen.membership.members, drain.member: me},
        drains={drain.pod_uid: drain},
        commit=commit,
    )
    moment = replace(seen, membership=membership)
    observations = observe(0.0, DrainObservations(), moment, {drain.pod_uid: 0.0})
    ended = decide(LATER_S, moment, observations, DrainPolicy()).drains
    return {uid: one.outcome for uid, one in ended.items()}


def sight_of(one: Pod, directory: Path) -> DrainView:
    run_dir = RunDir(str(directory))
    return DrainView(one.client, one.endpoint, "uid-w-0", run_dir)


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


async def test_i7_a_run_that_begins_later_counts_for_drains_in_a_pod_without_a_launcher(
    tmp_path: Path,
) -> None:
    engine = MemoryEngine()
    async with pod(engine, "w-0", least=2) as one, asyncio.timeout(DEADLINE_S):
        sight = sight_of(one, tmp_path)
        before = await sight.snapshot()
        assert outcomes(before, drained("w-0")) == {"uid-w-0": "uncommitted"}
        await one.client.mirror.reached(await put_round(engine, "digits", WORLD))
        seen = await sight.snapshot()
        # It stays below min, now that another pod trains.
        assert outcomes(seen, drained("w-0")) == {}
        assert seen.round is not None
        assert (seen.round.run, seen.round.number, seen.round.live) == ("digits", 3, True)


async def test_i7_what_a_pod_has_trained_in_a_later_stage_is_not_taken_for_saved(
    tmp_path: Path,
) -> None:
    engine, commit = MemoryEngine(), Commit(4, "digits", 3, "done", 70, mod_revision=2)
    async with pod(engine, "w-0") as one, asyncio.timeout(DEADLINE_S):
        sight = sight_of(one, tmp_path)
        await put_round(engine, "digits", WORLD)
        await put_round(engine, "digits", ENDED)
        began = await put_round(engine, "digits (stage 2)", replace(WORLD, number=0))
        await one.client.mirror.reached(began)
        seen = await sight.snapshot()
        acked = replace(seen, votes={"w-9": Vote(4, 3, "uid-w-9", 70, 70)})
        assert outcomes(acked, drained("w-9", 5.0), commit) == {"uid-w-9": "expired"}


async def test_a_stage_that_has_yet_to_form_a_world_is_no_life_in_which_nothing_was_trained(
    tmp_path: Path,
) -> None:
    engine = MemoryEngine()
    async with pod(engine, "w-0", least=2) as one, asyncio.timeout(DEADLINE_S):
        await one.client.mirror.reached(await put_round(engine, "digits", ENDED))
        async with connected(one.port) as raw:
            await raw.open_rendezvous("prepare")
            seen = await sight_of(one, tmp_path).snapshot()
            assert seen.round is not None
            assert (seen.round.run, seen.round.complete) == ("prepare", False)
            assert outcomes(seen, drained("w-0")) == {}


async def test_every_round_that_is_two_or_more_back_is_dropped() -> None:
    """Rounds 1 and 2 ended while their first node was away from the store."""
    engine, run = MemoryEngine(), HERE.run("digits")

    def key(number: int, name: str = "MASTER_ADDR") -> str:
        return run.value(round_prefix("digits", number) + name.encode())

    kept = {key(4), key(5), run.value(b"/mine")}
    puts = [Put(one, b"v") for one in (key(1), key(2), key(2, "x/y"), key(3), *kept)]
    counted = run.addend(round_prefix("digits", 2) + b"num_members", "w-9.1")
    await MemoryStore(engine).txn([], [*puts, Put(counted, b"1 #1")])
    await put_round(engine, "digits", replace(WORLD, number=5, frozen=(Seat("w-0", "n", 1),)))

    def there(one: Pod) -> set[str]:
        kvs = one.client.mirror.under(run.prefix)
        return {kv.key for kv in kvs if "/kv/" in kv.key or "/sum/" in kv.key}

    async with pod(engine, "w-0") as one, asyncio.timeout(DEADLINE_S):
        while there(one) != kept:
            await one.client.mirror.changed_after(one.client.mirror.sequence)


def open_runs(one: Pod) -> set[str]:
    return set(one.endpoint.rendezvous())


def tasks_of(run: str) -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name().endswith(f" {run}")]


async def test_a_run_that_is_over_is_let_go_once_no_torchrun_of_the_pod_is_in_it() -> None:
    engine = MemoryEngine()
    async with pod(engine, "w-0") as one, asyncio.timeout(DEADLINE_S):
        mirror = one.client.mirror
        await mirror.reached(await put_round(engine, "digits", WORLD))
        async with connected(one.port) as raw:
            await asks(raw, "digits")
            assert HERE.run("digits").node("w-0") in mirror.kvs
            await mirror.reached(await put_round(engine, "digits", ENDED))
            assert open_runs(one) == {"digits"}
            await mirror.reached(await put_round(engine, "digits (stage 2)", WORLD))
            assert open_runs(one) == {"digits", "digits (stage 2)"}
        while open_runs(one) != {"digits (stage 2)"}:
            await mirror.changed_after(mirror.sequence)
        while HERE.run("digits").node("w-0") in mirror.kvs:
            await mirror.changed_after(mirror.sequence)
        # The tasks of its rendezvous are cancelled by then, and end.
        await asyncio.gather(*tasks_of("digits"), return_exceptions=True)
        assert not tasks_of("digits")
    async with pod(engine, "w-1") as other, asyncio.timeout(DEADLINE_S):
        await other.endpoint.caught_up()
        assert open_runs(other) == {"digits (stage 2)"}


async def test_a_run_that_is_over_is_put_back_where_the_store_has_lost_it() -> None:
    engine = MemoryEngine()
    async with pod(engine, "w-0") as one, asyncio.timeout(DEADLINE_S):
        mirror, key = one.client.mirror, HERE.run("digits").round
        await put_round(engine, "digits", ENDED)
        await mirror.reached(await put_round(engine, "digits (stage 2)", WORLD))
        await one.endpoint.caught_up()
        assert open_runs(one) == {"digits (stage 2)"}
        await mirror.reached((await MemoryStore(engine).txn([], [Delete(key)])).revision)
        while key not in mirror.kvs:
            await mirror.changed_after(mirror.sequence)
        assert Round.from_kv(mirror.kvs[key]).closed == "success"
        assert open_runs(one) == {"digits (stage 2)"}
