# SPDX-License-Identifier: Apache-2.0
"""Drains in the middle of which a sidecar dies, the store is away, or an answer is lost."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Sequence
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


Mishap = Callable[[Job], Awaitable[None]]
"""Lets something happen to the drain of pod b; it gives the notice."""


async def drain_until(one: Job, phase: str) -> None:
    one.pods["b"].notice("sigterm", 120)
    await one.until(lambda: one.commit.phase == phase or phase in {c.phase for c in one.commits})


async def dies(who: str, when: str, one: Job) -> None:
    """The sidecar of a pod dies with a transaction on its way."""
    pod = one.pods[who]
    tripped = pod.cable.trip(*WHEN[when])
    one.pods["b"].notice("sigterm", 120)
    await tripped.wait()
    await pod.kill()
    await pod.start()


async def dies_in(phase: str, who: str, one: Job) -> None:
    """Sidecars die in a phase, and come back when others have saved."""
    await drain_until(one, phase)
    await one.pods["c"].soon(lambda: all(pod.shown() == phase for pod in one.pods.values()))
    await asyncio.gather(*(one.pods[name].kill() for name in who))
    for name in who:
        await one.pods["c"].soon(partial(one.pods["c"].steps, "save"))
        await one.pods[name].start()


async def away_in(phase: str, one: Job) -> None:
    """The store is away for three seconds."""
    if phase != "noted":
        await drain_until(one, phase)
    for pod in one.pods.values():
        pod.cable.cut()
    if phase == "noted":
        one.pods["b"].notice("sigterm", 120)
    await asyncio.sleep(3)
    for pod in one.pods.values():
        pod.cable.mend()


async def losses(seed: int, one: Job) -> None:
    """Requests and answers are lost."""
    chance = Random(seed)

    def lose(moment: Moment, operations: Sequence[Operation]) -> None:
        if chance.random() < 0.25:
            error = StoreUnavailable if moment == "sending" else StoreAmbiguous
            raise error(f"{moment}: lost")

    for pod in one.pods.values():
        pod.cable.on_txn = lose


async def unreadable_record(key: str, one: Job) -> None:
    await one.put(Put(key, b"\xff{not json"))


async def unreadable_file(name: str, content: bytes, one: Job) -> None:
    """A sidecar that has voted finds this, started again."""
    drained = one.pods["b"]
    tripped = drained.cable.trip("answering", HERE.votes_of(1))
    drained.notice("sigterm", 120)
    await tripped.wait()
    await drained.kill()
    drained.files[name] = content
    await drained.start()


FILES = ("drain.json", "gate.json", "gate.page")
CONTENTS = (b"", b"\xff\xfe", b'{"schema":1}', b"[" * 100_000)
MISHAPS: dict[str, Mishap] = {
    **{f"b dies {when}": partial(dies, "b", when) for when in WHEN},
    **{
        f"a dies {when}": partial(dies, "a", when) for when in ("before its vote", "after its vote")
    },
    **{
        f"{who} die in {phase}": partial(dies_in, phase, who)
        for phase in ("commit", "done")
        for who in ("a", "b", "abc")
    },
    **{f"away, {phase}": partial(away_in, phase) for phase in ("noted", "hold", "commit", "done")},
    **{f"losses {seed}": partial(losses, seed) for seed in range(6)},
    **{
        key.rpartition("/")[2]: partial(unreadable_record, key)
        for key in (HERE.commit, HERE.vote(1, "a"), KEYS.last_commit)
    },
    **{
        f"{name} is {content[:12]!r}": partial(unreadable_file, name, content)
        for name in FILES
        for content in CONTENTS
    },
}


@pytest.mark.parametrize("leavers", ["b", "ab"])
@pytest.mark.parametrize("mishap", MISHAPS.values(), ids=MISHAPS)
async def test_a_drain_is_seen_through_whatever_happens(mishap: Mishap, leavers: str) -> None:
    async with job("abc", trains="abc", loop=SAVES) as one:
        await mishap(one)
        # Who has given notice does so again.
        clients = [one.pods[name].notice("sigterm", 120) for name in leavers]
        for client in clients:
            assert await client.release() == "committed"
        await one.until(lambda: one.snapshot.drains["uid-b"].outcome == "committed")
        assert sorted(entry.member for entry in one.history()) == [*leavers]


async def test_a_sidecar_that_dies_with_no_drain_going_stops_no_step() -> None:
    async with job("ab", trains="ab") as one:
        await one.pods["a"].kill()
        await one.goes_on()
        await one.pods["a"].start()
        await one.goes_on()
        assert (one.commit.epoch, one.snapshot.drains) == (0, {})


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
