# SPDX-License-Identifier: Apache-2.0
"""``muster doctor`` on stores that have what it looks for; how slow is too slow is a unit table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from console.doctor import command as examine
from rdzv.keys import JobKeys
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.store import Put
from rdzv.store.access import Access
from rdzv.store.interface import Interval
from rdzv.store.memory.client import Faults, MemoryEngine, MemoryStore
from rdzv.store.memory.engine import Watcher
from rdzv.store.memory.server import EmbeddedServer
from tests.support.sidecars.processes import Ended, ended, impatient_muster, muster
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.full import SMALL, fill
from tests.support.store.patient_store import PatientEtcdStore

IN_ITS_TIME = """
from tests.support.sidecars.patient import LIMITS, main
LIMITS["doctor"]["console.doctor.command.CALL_TIMEOUT_S"] = 20.0
main()
"""
"""Runs the command line; no store is too slow for it, and a frozen member takes it 20 s."""


class Report:
    """What it has found of a store."""

    def __init__(self, command: Ended) -> None:
        assert "Traceback" not in command.err
        self.ended = command
        self.state: dict[str, Any] = json.loads(command.out)
        assert self.state["status"] == command.status
        self.status = command.status

    def level(self, level: str) -> dict[str, str]:
        """The sentences of one level, by check."""
        findings = self.state["findings"]
        return {one["check"]: one["sentence"] for one in findings if one["level"] == level}

    def remedies(self, level: str) -> str:
        return "\n".join(one["remedy"] for one in self.state["findings"] if one["level"] == level)


async def doctor(*endpoints: str, **environ: str) -> Report:
    """Let it examine a store, for as long as that takes."""
    words = ("doctor", "--job", "digits", "--json")
    named = {"MUSTER_ETCD_ENDPOINTS": ",".join(endpoints), **environ}
    return Report(await ended(words, named, ("-c", IN_ITS_TIME)))


async def doctor_of_nobody(endpoint: str) -> Report:
    """Let it examine a store of which nothing answers, however long it waits."""
    words = ("doctor", "--job", "digits", "--json", "--etcd-endpoints", endpoint)
    return Report(await impatient_muster(*words))


def examined(*endpoints: str, **environ: str) -> Report:
    return asyncio.run(doctor(*endpoints, **environ))


async def left_behind(endpoint: str) -> list[str]:
    store = PatientEtcdStore([endpoint])
    try:
        return [kv.key for kv in (await store.range("/muster/", prefix=True)).kvs]
    finally:
        await store.close()


async def test_the_embedded_store_is_no_fault_and_keeps_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts: list[int] = []
    async with EmbeddedServer() as server:
        watch = server.engine.watch

        def recorded(interval: Interval, start: int, wake: Callable[[], None]) -> Watcher:
            starts.append(start)
            return watch(interval, start, wake)

        monkeypatch.setattr(server.engine, "watch", recorded)
        writer = MemoryStore(server.engine)
        for _ in range(20):
            last = await writer.txn([], [Put("/a", b"")])
        report = await doctor(server.endpoint)
        assert report.status == 0
        assert report.level("fault") == {}
        assert "keeps nothing" in report.level("note")["version"]
        assert "renew a lease, delete" in report.level("ok")["rights"]
        assert "compaction" not in report.level("note")
        assert report.state["endpoints"][0]["read_p99_s"] is not None
        assert await left_behind(server.endpoint) == []
        assert list(server.engine.leases) == []
        # A watch from the first revision on makes etcd read all of it, and nobody may write.
        assert min(starts) >= last.revision
        await writer.compact(last.revision - 5)
        report = await doctor(server.endpoint)
        assert report.level("ok")["compaction"].startswith("the history was compacted")


async def test_for_people_it_says_what_to_do() -> None:
    async with EmbeddedServer() as server:
        told = await muster("doctor", "--job", "digits", "--etcd-endpoints", server.endpoint)
    assert "\n                     -> " in told.out
    assert told.out.splitlines()[-1].startswith("do first: ")
    nobody = await doctor_of_nobody("127.0.0.1:1")
    assert nobody.status == 69
    assert "127.0.0.1:1 does not answer" in nobody.level("fault")["endpoint"]


class Stopping(Faults):
    """Lets ten reads through, and answers no more."""

    def __init__(self) -> None:
        self.reads = 0

    async def before(self, call: str) -> None:
        self.reads += call == "range"
        if self.reads > 10:
            await asyncio.Event().wait()


async def test_an_endpoint_that_stops_answering_amid_the_reads_is_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, faults = MemoryEngine(), Stopping()
    monkeypatch.setattr(examine, "open_store", lambda _: MemoryStore(engine, faults=faults))
    report = await examine.endpoint_report(Access(("a:1",)), JobKeys("team", "digits"))
    assert len(report.reads_s) == 11
    assert report.error == f"no answer in {report.reads_s[-1]:.1f} s"
    assert not report.away


@pytest.mark.etcd
def test_three_members_one_of_them_frozen_or_not_named() -> None:
    with EtcdCluster() as cluster:
        report = examined(*cluster.endpoints)
        assert report.status == 0
        assert report.level("ok")["cluster"] == "all 3 members were reached"
        assert report.state["authenticated"] is False
        assert "access" not in report.level("warning")
        assert len({one["member_id"] for one in report.state["endpoints"]}) == 3
        assert {one["db_quota_bytes"] for one in report.state["endpoints"]} == {2 * 1024**3}
        report = examined(cluster.endpoints[0])
        assert "no endpoint reaches m1, m2" in report.level("warning")["cluster"]
        # Without the leader there would be more to tell, until another is elected.
        frozen = 1 if cluster.leader() == 0 else 0
        cluster.freeze(frozen)
        report = examined(*cluster.endpoints)
        assert report.status == 1
        (sentence,) = report.level("fault").values()
        assert sentence.startswith(f"{cluster.endpoints[frozen]} does not answer")
        assert "rights" in report.level("ok")
        assert asyncio.run(left_behind(cluster.endpoints[frozen - 1])) == []


@pytest.mark.etcd
@pytest.mark.long
def test_without_most_of_its_members_a_store_has_no_leader() -> None:
    with EtcdCluster() as cluster:
        cluster.kill(1)
        cluster.kill(2)
        report = asyncio.run(doctor_of_nobody(cluster.endpoints[0]))
    assert report.status == 69
    assert "see that most members of the store run" in report.remedies("fault")


async def filled(access: Access) -> None:
    """Fill it up, and compact some of it: real etcd is asked for that, too."""
    store = PatientEtcdStore(access)
    try:
        await fill(store)
        await store.compact((await store.status()).revision - 5)
    finally:
        await store.close()


def password_file(folder: Path, name: str, password: str) -> str:
    path = folder / name
    path.write_text(password)
    path.chmod(0o600)
    return str(path)


@pytest.mark.etcd
def test_a_store_that_asks_for_a_user(tmp_path: Path) -> None:
    root = password_file(tmp_path, "root", "root-password")
    job = password_file(tmp_path, "job", "of-the-job")
    reader = password_file(tmp_path, "reader", "reader-pw\n")
    as_reader = {"MUSTER_ETCD_USER": "reader", "MUSTER_ETCD_PASSWORD_FILE": reader}
    as_root = {"MUSTER_ETCD_USER": "root", "MUSTER_ETCD_PASSWORD_FILE": root}
    as_job = {"MUSTER_ETCD_USER": "digits", "MUSTER_ETCD_PASSWORD_FILE": job}
    prefix = "/muster/v1/default/digits/"
    with EtcdCluster(1) as cluster:
        cluster.etcdctl("user", "add", "reader", "--interactive=false", stdin="reader-pw")
        cluster.etcdctl("role", "add", "reading")
        cluster.etcdctl("role", "grant-permission", "reading", "read", prefix, "--prefix")
        cluster.etcdctl("user", "grant-role", "reader", "reading")
        cluster.enable_auth()

        nobody = examined(*cluster.endpoints)
        assert nobody.status == 1
        assert "not possible to read" in nobody.level("fault")["rights"]
        assert "user name is empty" in nobody.level("fault")["rights"]
        assert nobody.state["authenticated"] is True

        reads = examined(*cluster.endpoints, **as_reader)
        assert reads.status == 1
        assert "not possible to write" in reads.level("fault")["rights"]
        assert "permission denied" in reads.level("fault")["rights"]
        assert reads.state["endpoints"][0]["read_p50_s"] is not None

        password_file(tmp_path, "reader", "wrong")
        wrong = examined(*cluster.endpoints, **as_reader)
        assert wrong.status == 1
        assert "refuses this client" in wrong.level("fault")["endpoint"]

        words = ("--apply", "--user", "digits", "--new-password-file", job)
        endpoints = {"MUSTER_ETCD_ENDPOINTS": cluster.endpoints[0], **as_root}
        made = asyncio.run(muster("store-role", "digits", *words, **endpoints))
        assert made.status == 0, made.err
        own = examined(*cluster.endpoints, **as_job)
        assert own.status == 0
        assert own.level("warning") == {
            "members": "the store has no job digits in namespace default"
        }
        assert own.level("ok")["access"] == "authentication is on"
        assert "of-the-job" not in own.ended.out + own.ended.err


@pytest.mark.etcd
def test_a_store_without_room_is_a_fault_and_says_so_to_the_user_of_a_job_too(
    tmp_path: Path,
) -> None:
    root = password_file(tmp_path, "root", "root-password")
    job = password_file(tmp_path, "job", "of-the-job")
    as_root = {"MUSTER_ETCD_USER": "root", "MUSTER_ETCD_PASSWORD_FILE": root}
    as_job = {"MUSTER_ETCD_USER": "digits", "MUSTER_ETCD_PASSWORD_FILE": job}
    words = ("--apply", "--user", "digits", "--new-password-file", job)
    with EtcdCluster(1, arguments=SMALL) as cluster:
        named = {"MUSTER_ETCD_ENDPOINTS": cluster.endpoints[0], "MUSTER_JOB": "digits"}
        cluster.etcdctl(
            "put", JobKeys("default", "digits").job, Job(JobPolicy(1, 4)).to_json().decode()
        )
        cluster.enable_auth()
        made = asyncio.run(muster("store-role", "digits", *words, **named, **as_root))
        assert made.status == 0, made.err
        asyncio.run(filled(cluster.access(user="root", password_file=root)))
        report = examined(*cluster.endpoints, **as_root)
        state = asyncio.run(muster("status", "--json", **named, **as_job))
        plain = asyncio.run(muster("status", **named, **as_job))
    assert report.status == 1
    assert "NOSPACE" in report.level("fault")["alarm"]
    assert "quota of 16.8 MB" in report.level("fault")["size"]
    assert "not possible to" in report.level("fault")["rights"]
    assert "etcdctl alarm disarm" in report.remedies("fault")
    assert report.level("ok")["compaction"].startswith("the history was compacted")
    assert json.loads(state.out)["store_full"] is True
    assert json.loads(state.out)["store_authenticated"] is True
    assert "etcdctl alarm disarm" in plain.out
