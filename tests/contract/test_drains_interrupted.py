# SPDX-License-Identifier: Apache-2.0
"""Drains in the middle of which a sidecar dies, the store is away, or an answer is lost."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

import pytest

from agent.rundir.files import RunDir
from muster.progress import ProgressFile
from rdzv.errors import StoreAmbiguous, StoreUnavailable
from rdzv.store import Operation, Put
from tests.support.sidecars.cable import Moment
from tests.support.sidecars.drains import HERE, Job, job
from tests.support.sidecars.jobs import KEYS
from tests.support.sidecars.ranks import Loop

pytestmark = pytest.mark.virtual

SAVES = Loop(save_s=0.15)

WHEN: dict[str, tuple[Moment, str]] = {
    "noted": ("sending", HERE.drains),
    "on record": ("answering", HERE.drains),
    "before its vote": ("sending", HERE.votes_of(1)),
    "after its vote": ("answering", HERE.votes_of(1)),
}
"""Moments at which a transaction of the sidecar's is held, for it to die there."""


async def finish(one: Job, client_of: str = "b") -> int:
    """Wait until the drain ends as it should; return the one step that was saved."""
    await one.until(lambda: one.snapshot.drains[f"uid-{client_of}"].outcome != "")
    assert one.snapshot.drains[f"uid-{client_of}"].outcome == "committed"
    return {step for _, step in one.done}.pop()


async def drain_until(one: Job, phase: str) -> None:
    await one.until(lambda: one.commit.phase == phase or phase in {c.phase for c in one.commits})


@pytest.mark.parametrize("when", WHEN)
async def test_the_sidecar_of_the_pod_that_drains_dies(when: str) -> None:
    async with job("abc", trains="abc", loop=SAVES) as one:
        drained = one.pods["b"]
        tripped = drained.cable.trip(*WHEN[when])
        client = drained.notice("sigterm", 120)
        await tripped.wait()
        await drained.kill()
        await drained.start()
        assert await client.release() == "committed"
        assert len({await finish(one)}) == 1
        assert len(one.history()) == 1


@pytest.mark.parametrize("when", ["before its vote", "after its vote"])
async def test_the_sidecar_of_another_pod_dies(when: str) -> None:
    async with job("abc", trains="abc", loop=SAVES) as one:
        tripped = one.pods["a"].cable.trip(*WHEN[when])
        client = one.pods["b"].notice("sigterm", 120)
        await tripped.wait()
        await one.pods["a"].kill()
        await asyncio.sleep(0)
        await one.pods["a"].start()
        assert await client.release() == "committed"
        await finish(one)


@pytest.mark.parametrize("phase", ["commit", "done"])
@pytest.mark.parametrize("who", ["a", "b"])
async def test_a_sidecar_dies_while_ranks_save_and_after(phase: str, who: str) -> None:
    async with job("abc", trains="abc", loop=SAVES) as one:
        client = one.pods["b"].notice("sigterm", 120)
        await drain_until(one, phase)
        await one.pods[who].kill()
        await one.pods["c"].soon(partial(one.pods["c"].steps, "save"))
        await one.pods[who].start()
        assert await client.release() == "committed"
        await finish(one)


async def test_all_sidecars_die_at_once_while_ranks_save() -> None:
    async with job("abc", trains="abc", loop=SAVES) as one:
        client = one.pods["b"].notice("sigterm", 120)
        await one.pods["a"].soon(lambda: all(pod.shown() == "commit" for pod in one.pods.values()))
        await asyncio.gather(*(pod.kill() for pod in one.pods.values()))
        for pod in one.pods.values():
            await pod.soon(partial(pod.steps, "save"))
            await pod.start()
        assert await client.release() == "committed"
        await finish(one)


async def test_a_sidecar_that_dies_with_no_drain_going_stops_no_step() -> None:
    async with job("ab", trains="ab") as one:
        await one.pods["a"].kill()
        await one.goes_on()
        await one.pods["a"].start()
        await one.goes_on()
        assert (one.commit.epoch, one.snapshot.drains) == (0, {})


async def test_the_store_is_away_for_three_seconds_at_each_phase() -> None:
    async with asyncio.TaskGroup() as tasks:
        for phase in ("noted", "hold", "commit", "done"):
            tasks.create_task(away_for_three_seconds(phase), name=phase)


async def away_for_three_seconds(phase: str) -> None:
    async with job("ab", below_min="commit", trains="ab", loop=SAVES) as one:
        pods = one.pods.values()
        if phase == "noted":
            for pod in pods:
                pod.cable.cut()
            client = one.pods["b"].notice("sigterm", 120)
        else:
            client = one.pods["b"].notice("sigterm", 120)
            await drain_until(one, phase)
            for pod in pods:
                pod.cable.cut()
        await asyncio.sleep(3)
        for pod in pods:
            pod.cable.mend()
        assert await client.release() == "committed"
        await finish(one)


@pytest.mark.parametrize("seeds", [range(3), range(3, 6)])
async def test_answers_and_requests_are_lost(seeds: range) -> None:
    async with asyncio.TaskGroup() as tasks:
        for seed in seeds:
            tasks.create_task(losing(seed, "ab" if seed % 2 else "b"), name=f"seed {seed}")


async def losing(seed: int, leavers: str) -> None:
    async with job("abc", trains="abc", loop=SAVES) as one:
        chance = Random(seed)

        def lose(moment: Moment, operations: Sequence[Operation]) -> None:
            if chance.random() < 0.25:
                error = StoreUnavailable if moment == "sending" else StoreAmbiguous
                raise error(f"{moment}: lost")

        for pod in one.pods.values():
            pod.cable.on_txn = lose
        clients = [one.pods[name].notice("sigterm", 120) for name in leavers]
        for client in clients:
            assert await client.release() == "committed"
        await finish(one)
        assert sorted(entry.member for entry in one.history()) == [*leavers]


@pytest.mark.parametrize("key", [HERE.commit, HERE.vote(1, "a"), KEYS.last_commit])
async def test_records_that_cannot_be_read_stop_nothing(key: str) -> None:
    async with job("ab", trains="ab", loop=SAVES) as one:
        await one.put(Put(key, b"\xff{not json"))
        assert await one.pods["b"].notice("sigterm", 120).release() == "committed"
        await finish(one)


@pytest.mark.parametrize("name", ["drain.json", "gate.json", "commit.json"])
async def test_files_that_cannot_be_read_stop_nothing(name: str) -> None:
    async with asyncio.TaskGroup() as tasks:
        for content in (b"", b"\xff\xfe", b'{"schema":1}', b"[" * 100_000):
            tasks.create_task(with_file(name, content), name=f"{name}: {content[:20]!r}")


async def with_file(name: str, content: bytes) -> None:
    async with job("ab", trains="ab", loop=SAVES) as one:
        drained = one.pods["b"]
        tripped = drained.cable.trip("answering", HERE.votes_of(1))
        client = drained.notice("sigterm", 120)
        await tripped.wait()
        await drained.kill()
        drained.files[name] = content
        await drained.start()
        assert await client.release() == "committed"
        await finish(one)


def test_i8_what_else_lies_in_the_run_directory_stops_nothing(tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    ProgressFile(str(progress), {"LOCAL_RANK": "1"}).write(7)
    os.mkfifo(progress / "7.json")
    (progress / "8.json").symlink_to("/dev/zero")
    (progress / "9.json").mkdir()
    (progress / "10.json").write_bytes(b"\x00" * 10_000)
    (tmp_path / "workers").symlink_to(tmp_path / "workers")
    run_dir = RunDir(str(tmp_path))
    assert [(rank.local_rank, rank.step) for rank in run_dir.ranks()] == [(1, 7)]
    assert run_dir.commands() is None


async def test_drain_notes_of_another_pod_drain_nobody() -> None:
    async with job("ab") as one:
        drained = one.pods["b"]
        client = drained.notice("sigterm", 120)
        await client.last()
        await drained.kill()
        kept = drained.kept()
        former = json.dumps({**(kept or {}), "generation": 0}).encode()
        drained.files["drain.json"] = former
        drained.uid, drained.held = "uid-new", None
        await drained.start()
        await one.until(lambda: one.snapshot.members["b"].pod_uid == "uid-new")
        assert not drained.drains.own.active
        await drained.soon(drained.registrar.registered.is_set)
        assert {*one.snapshot.drains} == {"uid-b"}


async def test_a_notice_before_the_store_has_been_read_is_kept() -> None:
    async with job("ab") as one:
        drained = one.pods["b"]
        await drained.kill()
        await drained.start(cut=True)
        client = drained.notice("prestop")
        await drained.soon(lambda: client.phases == ["noted"])
        kept = drained.kept()
        assert kept is not None
        assert kept["sources"] == ["prestop"]
        drained.cable.mend()
        assert (await client.last()).outcome == "uncommitted"
