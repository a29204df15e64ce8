# SPDX-License-Identifier: Apache-2.0
"""``muster status`` beside its members: launchers that go past Muster, a store that lets everybody
in, and how far data sets are that are handed out in shards."""

from __future__ import annotations

import json

import pytest

from console.job import status
from rdzv.errors import StoreFull, StoreUnavailable
from rdzv.keys import JobKeys
from rdzv.records.codec import dump_record
from rdzv.records.drain import Drain
from rdzv.records.job import Job, Member
from rdzv.records.policy import JobPolicy
from rdzv.records.shards import OpenShards, Plan, PodShards, ShardWorld, Share, TrainedShards
from rdzv.records.troubles import Bypass
from rdzv.store import Put
from rdzv.store.access import Access
from rdzv.store.memory.client import MemoryStore
from rdzv.store.memory.server import EmbeddedServer
from tests.support.sidecars.processes import muster
from tests.support.store.patient_store import PatientEtcdStore
from tests.support.store.tcp_proxy import TcpProxy

KEYS = JobKeys("default", "digits")
HERE = KEYS.in_generation(1)
FORGED = dump_record({"kind": "elsewhere", "sentence": "it was given \x1b[2J:1"})


def member(number: int, name: str) -> Member:
    return Member(name, f"uid-{name}", number, "10.0.0.1", "", "worker", 1, 1, 4)


async def test_the_sentence_stands_beside_the_member() -> None:
    async with EmbeddedServer() as server:
        await MemoryStore(server.engine).txn(
            [],
            [
                Put(KEYS.job, Job(JobPolicy(1, 4)).to_json()),
                *(Put(HERE.member(n), member(i, n).to_json()) for i, n in enumerate("abc", 1)),
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
        await MemoryStore(server.engine).txn([], [Put(KEYS.job, Job(JobPolicy(1, 4)).to_json())])
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


async def test_a_store_that_takes_no_writes_is_said_with_the_commands_that_cure_it() -> None:
    async with EmbeddedServer() as server:
        await MemoryStore(server.engine).txn([], [Put(KEYS.job, Job(JobPolicy(1, 4)).to_json())])
        server.engine.full = True
        writer = PatientEtcdStore([server.endpoint])
        with pytest.raises(StoreFull, match="etcdctl alarm disarm"):
            await writer.txn([], [Put(KEYS.job, b"")])
        with pytest.raises(StoreFull):
            await writer.lease_grant(4711, 60)
        await writer.close()
        environ = {"MUSTER_ETCD_ENDPOINTS": server.endpoint, "MUSTER_JOB": "digits"}
        plain = await muster("status", **environ)
        state = json.loads((await muster("status", "--json", **environ)).out)
    assert plain.status == 0
    assert "the store takes no writes (NOSPACE)" in plain.out
    for command in ("etcdctl compact", "etcdctl defrag", "etcdctl alarm disarm"):
        assert command in plain.out
    assert state["store_full"] is True


async def test_data_sets_in_shards_are_a_table_and_what_is_wrong_with_them_is_below() -> None:
    images, texts, lost = (KEYS.shards_of(name) for name in ("images", "texts", "lost"))
    world = ShardWorld("w1", Plan(10, 2, None), ranks=2, start=0).to_json()
    share = Share(held=((2, 4),), used=((4, 5),))
    async with EmbeddedServer() as server:
        await MemoryStore(server.engine).txn(
            [],
            [
                Put(KEYS.job, Job(JobPolicy(1, 4)).to_json()),
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
    assert KEYS.shards_of("lost").world in plain.out
    assert state["shards"]["images"] == {
        "progress": {"epoch": 0, "open": 2.0, "leased": 1.0, "trained": 0.5, "done": 1.5},
        "warning": "",
    }
    assert state["shards"]["lost"]["progress"] is None
