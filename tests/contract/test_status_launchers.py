# SPDX-License-Identifier: Apache-2.0
"""``muster status`` says what became of launchers and of incidents; a job that is forgotten."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from console.job import status
from launcher_shim.c10d.rounds.records import Round, Seat
from rdzv.drain.gate import Gate
from rdzv.errors import StoreUnavailable
from rdzv.keys import JobKeys
from rdzv.records.codec import dump_record
from rdzv.records.drain import Drain, LastCommit
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.records.shards import OpenShards, Plan, PodShards, ShardWorld, Share, TrainedShards
from rdzv.records.troubles import Bypass
from rdzv.store import Put
from rdzv.store.access import Access
from rdzv.store.memory.client import MemoryStore
from rdzv.store.memory.server import EmbeddedServer
from tests.support.records import member
from tests.support.sidecars.drain_commands import Terminal, terminal
from tests.support.sidecars.jobs import KEYS
from tests.support.sidecars.processes import Ended, impatient_muster, muster
from tests.support.store.tcp_proxy import TcpProxy

JOB = JobKeys("default", "digits")
HERE = JOB.in_generation(1)
FORGED = dump_record({"kind": "elsewhere", "sentence": "it was given \x1b[2J:1"})


async def test_the_sentence_stands_beside_the_member() -> None:
    async with EmbeddedServer() as server:
        await MemoryStore(server.engine).txn(
            [],
            [
                Put(JOB.job, Job(JobPolicy(1, 4)).to_json()),
                *(Put(HERE.member(n), member(n, i).to_json()) for i, n in enumerate("abc", 1)),
                Put(HERE.drain("uid-c"), Drain("uid-c", "c", "spot", "hand").to_json()),
                Put(HERE.bypass("b"), FORGED),
                Put(HERE.bypass("c"), Bypass("nnodes", "its torchrun has 1:2", 8).to_json()),
                Put(HERE.bypass("a"), b"no record"),
                Put(HERE.bypass("gone"), FORGED),
            ],
        )
        environ = {"MUSTER_ETCD_ENDPOINTS": server.endpoint, "MUSTER_JOB": "digits"}
        plain = await muster("status", **environ)
        state = json.loads((await muster("status", "--json", **environ)).out)
    rows = {row.split()[0]: row for row in plain.out.splitlines() if row.strip()}
    assert rows["b"].split()[1] == "ready"
    assert rows["b"].rstrip().endswith("it was given ?[2J:1")
    assert "spot" in rows["c"]
    assert rows["c"].rstrip().endswith("; its torchrun has 1:2")
    assert "torchrun" not in rows["a"]
    assert "\x1b" not in plain.out
    assert [m["launcher"] for m in state["members"]] == ["", "elsewhere", "nnodes"]
    assert [m["slots"] for m in state["members"]] == [1, 1, 8]
    assert state["store_authenticated"] is False
    assert "authentication" not in plain.out


async def test_a_dead_first_endpoint_hides_no_warning() -> None:
    async with EmbeddedServer() as server, TcpProxy(server.endpoint) as dead:
        await MemoryStore(server.engine).txn([], [Put(JOB.job, Job(JobPolicy(1, 4)).to_json())])
        dead.hold()
        endpoints = f"{dead.endpoint},{server.endpoint}"
        environ = {"MUSTER_JOB": "digits", "MUSTER_ETCD_ENDPOINTS": endpoints}
        state = await muster("status", "--json", **environ)
    assert json.loads(state.out)["store_authenticated"] is False


async def test_what_is_not_known_of_the_store_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(access: Access, *, timeout_s: float) -> bool:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(status, "auth_enabled", silent)
    async with EmbeddedServer() as server:
        store = status.StoreState()
        await store.ask(Access((server.endpoint,)))
    assert store.enabled is None
    (warning,) = store.warnings()
    assert "is unknown: no answer" in warning.title


async def test_data_sets_in_shards_are_a_table_and_what_is_wrong_with_them_is_below() -> None:
    images, texts, lost = (JOB.shards_of(name) for name in ("images", "texts", "lost"))
    world = ShardWorld("w1", Plan(10, 2, None), ranks=2, start=0).to_json()
    share = Share(held=((2, 4),), used=((4, 5),))
    async with EmbeddedServer() as server:
        await MemoryStore(server.engine).txn(
            [],
            [
                Put(JOB.job, Job(JobPolicy(1, 4)).to_json()),
                *(Put(one.world, world) for one in (images, texts)),
                Put(images.open, OpenShards(frontier=6).to_json()),
                Put(images.pod("a"), PodShards("a", "uid-a", {0: share}).to_json()),
                Put(texts.trained, TrainedShards(unknown=40).to_json()),
                Put(lost.world, b"no record"),
            ],
        )
        environ = {"MUSTER_ETCD_ENDPOINTS": server.endpoint, "MUSTER_JOB": "digits"}
        plain = await muster("status", **environ)
        state = json.loads((await muster("status", "--json", **environ)).out)
    rows = [row.split() for row in plain.out.splitlines()]
    assert ["SHARDS", "OF", "EPOCH", "OPEN", "LEASED", "TRAINED", "DONE"] in rows
    assert ["images", "0", "2.0", "1.0", "0.5", "1.5"] in rows
    assert ["texts", "0", "5.0", "0.0", "0.0", "0.0"] in rows
    assert "shards of texts: nothing was on record" in plain.out
    assert JOB.shards_of("lost").world in plain.out
    assert state["shards"]["images"] == {
        "progress": {"epoch": 0, "open": 2.0, "leased": 1.0, "trained": 0.5, "done": 1.5},
        "warning": "",
    }
    assert state["shards"]["lost"]["progress"] is None


def the_one_thing(doctor: Ended) -> str:
    last = doctor.out.splitlines()[-1]
    assert last.startswith("do first: ")
    return last


async def test_a_store_that_is_away_says_what_it_means_and_what_to_check() -> None:
    words = ("--job", "digits", "--etcd-endpoints", "127.0.0.1:1")
    status, doctor = (
        await impatient_muster("status", *words),
        await impatient_muster("doctor", *words),
    )
    assert (status.status, doctor.status) == (69, 69)
    assert "worlds that train go on; no pod joins or leaves until it answers" in status.err
    assert doctor.out.startswith("fault    endpoint    127.0.0.1:1 does not answer")
    assert "see that this member of the store runs and can be reached" in the_one_thing(doctor)


async def test_a_store_that_is_full_says_how_to_make_room() -> None:
    trains = Round(1, True, frozen=(Seat("a", "n", 1), Seat("b", "n", 1)))
    puts = [
        Put(JOB.job, Job(JobPolicy(1, 4)).to_json()),
        Put(HERE.run("digits").round, trains.to_json()),
        *(Put(HERE.member(name), member(name).to_json()) for name in "ab"),
    ]
    async with EmbeddedServer() as server:
        await MemoryStore(server.engine).txn([], puts)
        server.engine.full = True
        environ = {"MUSTER_ETCD_ENDPOINTS": server.endpoint, "MUSTER_JOB": "digits"}
        status, doctor = await muster("status", **environ), await muster("doctor", **environ)
    assert status.out.startswith("digits is training: a world of 2 nodes\n")
    assert "the store takes no writes (NOSPACE): worlds that have formed train on" in status.out
    assert "etcdctl defrag" in status.out
    assert doctor.status == 1
    assert "NOSPACE" in doctor.out.splitlines()[0]
    assert "etcdctl alarm disarm" in the_one_thing(doctor)


LAST = LastCommit(60, 0, 7, job_uid="uid-digits")


async def shown(at: Terminal, name: str, expected: LastCommit | None, *, former: bool) -> None:
    """Wait until a pod's gate tells its ranks this."""

    def tells() -> bool:
        content = at.one.pods[name].files.get("gate.json")
        if content is None:
            return False
        gate = Gate.from_json("gate.json", content)
        return (gate.last_commit, gate.of_former_life) == (expected, former)

    await at.one.pods[name].soon(tells)


async def test_a_commit_of_a_former_life_is_told_as_one() -> None:
    async with terminal(trains="ab") as at:
        for uid, former in (("uid-before", True), ("uid-digits", False)):
            await at.one.put(Put(KEYS.last_commit, replace(LAST, job_uid=uid).to_json()))
            for name in "ab":
                await shown(at, name, replace(LAST, job_uid=""), former=former)
        at.one.done.clear()  # none of these ranks has saved it


async def test_what_is_forgotten_is_not_told_any_more_and_later_epochs_are_above_it() -> None:
    async with terminal(trains="ab") as at:
        await at.one.put(Put(KEYS.last_commit, LAST.to_json()))
        await shown(at, "a", replace(LAST, job_uid=""), former=False)
        ended = await at.command("forget")
        assert (ended.status, ended.err) == (0, "")
        assert ended.out.startswith("forgotten: step 60; the next start of job digits goes on from")
        await shown(at, "a", None, former=False)
        again = await at.command("forget")
        assert again.status == 0
        assert again.out == "job digits has no last commit: there is nothing to forget\n"
        assert "the last commit, step 60, is forgotten" in (await at.history()).out
        at.one.done.clear()  # none of these ranks has saved it
        assert (await at.drain("b")).status == 0
        await at.one.until(lambda: at.one.commit.epoch > LAST.epoch)


async def test_a_record_that_cannot_be_read_is_forgotten_too() -> None:
    async with terminal() as at:
        await at.one.put(Put(KEYS.last_commit, b"[]"))
        ended = await at.command("forget")
        assert ended.out.startswith("forgotten: a last commit that could not be read")
        assert KEYS.last_commit not in at.one.snapshot.corrupt
