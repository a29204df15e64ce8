# SPDX-License-Identifier: Apache-2.0
"""``muster set``, ``pause`` and ``resume`` as real processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

import pytest

from launcher_shim.c10d.rounds.records import Node, Round, Seat
from rdzv.keys import JobKeys
from rdzv.records.drain import Commit, Drain
from rdzv.records.history import HistoryEntry
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.records.troubles import Failure
from rdzv.store import Put
from rdzv.store.memory.client import MemoryStore
from rdzv.store.memory.server import EmbeddedServer
from tests.support.records import member
from tests.support.sidecars.processes import PATIENCE_S, Ended, muster, started

KEYS = JobKeys("default", "digits")
LIVE = KEYS.in_generation(3)
RUN = LIVE.run("digits")
newer = partial(member, version="0.2.0", min_workers=2, most=6)


class Stored:
    """A job of six members, four of which train, in a store that a command can reach."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.store = MemoryStore(server.engine)
        self.environ = {"MUSTER_ETCD_ENDPOINTS": server.endpoint, "MUSTER_JOB": "digits"}

    async def begin(self) -> None:
        world = Round(7, True, frozen=tuple(Seat(name, "n", 1) for name in "abcd"))
        await self.store.txn(
            [],
            [
                Put(KEYS.job, Job(JobPolicy(2, 4), generation=3, template="min=2 max=4").to_json()),
                *(Put(LIVE.member(n), newer(n, at).to_json()) for at, n in enumerate("abcdef", 1)),
                Put(RUN.round, world.to_json()),
            ],
        )

    async def muster(self, *arguments: str) -> Ended:
        return await muster(*arguments, **self.environ)

    async def job(self) -> Job:
        return Job.from_kv((await self.store.range(KEYS.job)).kvs[0])

    async def history(self) -> list[HistoryEntry]:
        kvs = (await self.store.range(KEYS.history, prefix=True)).kvs
        return [HistoryEntry.from_kv(kv) for kv in kvs]


@pytest.fixture
async def stored() -> AsyncIterator[Stored]:
    async with EmbeddedServer() as server:
        one = Stored(server)
        await one.begin()
        yield one


async def test_set_says_what_was_what_is_and_what_follows(stored: Stored) -> None:
    grown = await stored.muster("set", "--max", "6", "--gather", "30s")
    assert grown.out.splitlines() == [
        "job digits: max is 6 (before: 4), gather is 30s (before: 0s)",
        "2 of 6 members no longer stand by, and may join",
    ]
    shrunk = await stored.muster("set", "digits", "--sizes", "2,4", "--json")
    told = json.loads(shrunk.out)
    assert (told["before"]["sizes"], told["now"]["sizes"], told["changed"]) == ([], [2, 4], True)
    assert told["follows"] == (
        "2 of 6 members will stand by: they save with all others and leave the world"
    )
    job = await stored.job()
    assert (job.policy.max_nodes, job.policy.sizes, job.template) == (6, (2, 4), "min=2 max=4")
    who, again = await stored.history()
    assert who.what == again.what == "set"
    assert "@" in who.member
    assert who.why == "max is 6 (before: 4), gather is 30s (before: 0s)"


async def test_set_to_what_is_changes_nothing(stored: Stored) -> None:
    ended = await stored.muster("set", "--max", "4")
    assert (ended.status, ended.out) == (
        0,
        "job digits: it has these values already, nothing changes\n",
    )
    assert await stored.history() == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--min", "5"], "the job stays as it is: min is 5, more than max, which is 4"),
        (["--unit", "5"], "no multiple of 5 lies between min 2 and max 4"),
        (["--sizes", "5,6"], "none of the sizes 5, 6 lies between min 2 and max 4"),
        (["--sizes", "2", "--unit", "2"], "--sizes and --unit are both given"),
        (["--desired", "9"], "desired is 9, not between min 2 and max 4"),
        (["--max", "none"], "--max: 'none' is wrong: expected a whole number"),
        ([], "nothing to set: give --min"),
    ],
)
async def test_what_cannot_be_is_refused_and_the_job_goes_on_with_what_it_had(
    stored: Stored, given: list[str], said: str
) -> None:
    before = await stored.job()
    ended = await stored.muster("set", *given)
    assert ended.status == 2
    assert said in ended.err
    assert await stored.job() == before


async def test_a_sidecar_that_would_not_understand_keeps_the_job_as_it_is(stored: Stored) -> None:
    await stored.store.txn([], [Put(LIVE.member("a"), member("a").to_json())])
    for command in (["set", "--max", "6"], ["pause"]):
        ended = await stored.muster(*command)
        assert ended.status == 2
        assert "the sidecar of a is of 0.1.0" in ended.err
    assert (await stored.job()).policy.max_nodes == 4
    assert not (await stored.job()).paused


async def test_a_pause_that_waits_for_an_older_sidecar_to_go_says_so(stored: Stored) -> None:
    await stored.muster("pause", "--reason", "night")
    await stored.store.txn([], [Put(LIVE.member("a"), member("a").to_json())])
    status = (await stored.muster("status")).out
    assert ": paused, once no sidecar of 0.1.0 is there, since " in status


async def test_a_pause_of_a_horovodrun_has_its_ranks_save_and_a_resume_takes_that_back(
    stored: Stored,
) -> None:
    launcher = newer("launcher", 9, role="launcher")
    await stored.store.txn([], [Put(LIVE.member("launcher"), launcher.to_json())])
    process = await started(("pause", "--wait", "--reason", "night"), stored.environ)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        assert (await process.stdout.readline()).startswith(b"pausing")
        assert (await stored.job()).paused
        (kv,) = (await stored.store.range(LIVE.drain(launcher.pod_uid))).kvs
        drain = Drain.from_kv(kv)
        assert (drain.source, drain.seconds_left) == ("pause", None)
        assert drain.reason == "the job pauses: night"
        for changed, line in (
            (replace(drain, saver="a"), b"saving     a rank of a saves"),
            (replace(drain, saver="a", step=40, outcome="committed"), b"paused     step 40 is"),
        ):
            await stored.store.txn([], [Put(LIVE.drain(launcher.pod_uid), changed.to_json())])
            assert (await process.stdout.readline()).startswith(line)
        assert await process.wait() == 0
    assert (await stored.muster("resume")).out.startswith("job digits is resumed")
    assert not (await stored.job()).paused
    assert not (await stored.store.range(LIVE.drain(launcher.pod_uid))).kvs


def commit(**changes: object) -> Put:
    record = Commit(epoch=1, run="digits", round=7, phase="hold", joins=True)
    return Put(LIVE.commit, replace(record, **changes).to_json())  # type: ignore[arg-type]


@pytest.mark.parametrize(("saved", "status"), [(True, 0), (False, 6)])
async def test_pause_waits_until_all_have_saved_and_left(
    stored: Stored, *, saved: bool, status: int
) -> None:
    process = await started(("pause", "--wait", "--reason", "night"), stored.environ)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        assert (await process.stdout.readline()).startswith(b"pausing    4 members train")
        assert (await stored.job()).paused
        await stored.store.txn([], [commit()])
        assert (await process.stdout.readline()).startswith(b"agreeing")
        if saved:
            await stored.store.txn([], [commit(phase="commit", step=40)])
            assert b"at step 40" in await process.stdout.readline()
            await stored.store.txn([], [commit(phase="done", step=40)])
            assert b"saved step 40" in await process.stdout.readline()
        await stored.store.txn([], [Put(RUN.round, Round(8).to_json())])
        last = await process.stdout.readline()
        assert last.startswith(b"paused     no world" if saved else b"unsaved    the world ended")
        assert await process.wait() == status
    shown = await stored.muster("status")
    assert "paused since " in shown.out
    assert ": night; " in shown.out
    resumed = await stored.muster("resume")
    assert resumed.out == "job digits is resumed: 6 members are there\n"
    assert not (await stored.job()).paused
    assert [entry.what for entry in await stored.history()] == ["pause", "resume"]
    again = await stored.muster("resume")
    assert again.out == "job digits is not paused: nothing changes\n"


async def test_resume_lets_a_job_try_at_once_that_waits_after_failed_starts(stored: Stored) -> None:
    waits = Round(8, former=tuple("abcd"), failed_starts=5, waits=2)
    asking = [Node(name, "asking", "n", 9, "10.0.0.1", 1, 0) for name in "abcd"]
    failed = [Failure(name, "digits", 7, kind="ImportError") for name in "abcd"]
    puts = [
        *(Put(RUN.node(one.member), one.to_json()) for one in asking),
        *(Put(LIVE.failure(one.member), one.to_json()) for one in failed),
    ]
    await stored.store.txn([], [Put(RUN.round, waits.to_json()), *puts])
    before = await stored.job()
    assert "waits 80 s before round 8" in (await stored.muster("status")).out
    tried = await stored.muster("resume")
    assert tried.out == "job digits tries again at once: 6 members are there\n"
    after = await stored.job()
    assert after == replace(before, mod_revision=after.mod_revision)
    assert after.mod_revision > before.mod_revision
    assert "waits 80 s" not in (await stored.muster("status")).out
    assert (await stored.muster("resume")).out.endswith("is not paused: nothing changes\n")


async def test_a_wait_ends_when_somebody_resumes_the_job(stored: Stored) -> None:
    process = await started(("pause", "--wait", "--json"), stored.environ)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        await process.stdout.readline()
        await stored.muster("resume")
        assert json.loads(await process.stdout.readline())["outcome"] == "resumed"
        assert await process.wait() == 4


async def test_there_is_nothing_to_change_of_a_job_that_the_store_does_not_have(
    stored: Stored,
) -> None:
    for command in (["set", "--max", "2"], ["pause"], ["resume"]):
        ended = await stored.muster(*command, "--job", "other")
        assert ended.status == 66
        assert "no job other in namespace default" in ended.err
