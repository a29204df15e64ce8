# SPDX-License-Identifier: Apache-2.0
"""``muster doctor`` on stores that have what it looks for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from console.doctor import examine
from console.doctor.diagnosis import READ_WARNING_S
from rdzv.errors import StoreAmbiguous, StoreFull, StoreUnavailable
from rdzv.keys import JobKeys
from rdzv.store import Put
from rdzv.store.access import Access
from rdzv.store.intervals import Interval
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from rdzv.store.memory.engine import Watcher
from rdzv.store.memory.faults import Faults
from rdzv.store.memory.server import EmbeddedServer
from tests.support.clocks.calm import calmly, loop_lag
from tests.support.sidecars.processes import Ended, muster
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.patient_store import PatientEtcdStore

PATIENCE_S = 150.0
"""For how long it examines again: what a busy machine is late with is no fault of the store."""

LATE_S = READ_WARNING_S / 2
"""Later than this a turn comes only where this process stood still, and so may what it examines."""

BUSY = 0.5
"""Where something waited for a core or a disk for more of the time, others keep them busy."""


def waited_s() -> float:
    """For how long something here has ever waited for a core or a disk, if the kernel counts it."""
    waited_us = 0
    for what in ("cpu", "io"):
        with suppress(OSError):
            some = Path("/proc/pressure", what).read_text().splitlines()[0]
            waited_us += int(some.rpartition("total=")[2])
    return waited_us / 1e6


async def repeatedly(scenario: Callable[[], Awaitable[None]]) -> None:
    """Let a store be examined until all is found that is expected; at once on a calm machine.

    Where this machine is busy or stands still, steps fail that would not, and checks are left out.
    """
    deadline_s = monotonic() + PATIENCE_S
    while True:
        began_s, before_s = monotonic(), await asyncio.to_thread(waited_s)
        async with loop_lag() as lag_s:
            try:
                await scenario()
                return
            except (AssertionError, LookupError, ValueError):
                waiting_s = await asyncio.to_thread(waited_s) - before_s
                busy = waiting_s > BUSY * (monotonic() - began_s)
                calm = not busy and lag_s() <= LATE_S
                if calm or monotonic() > deadline_s:
                    raise


async def examined(*arguments: str, **environ: str) -> Ended:
    """Let it examine a store; that it fails itself is not excused by any machine."""
    ended = await muster("doctor", "--job", "digits", *arguments, **environ)
    if "Traceback" in ended.err:
        pytest.fail(ended.err)
    return ended


async def doctor(*endpoints: str, **environ: str) -> tuple[Ended, dict[str, Any]]:
    """Let it examine a store; returns how it ended, and what it found as JSON."""
    named = {"MUSTER_ETCD_ENDPOINTS": ",".join(endpoints), **environ}
    ended = await examined("--json", **named)
    state = json.loads(ended.out)
    assert state["status"] == ended.status
    return ended, state


async def a_follower(cluster: EtcdCluster) -> int:
    """A member that is not the leader."""
    store = PatientEtcdStore(cluster.endpoints[:1])
    status = await store.status()
    await store.close()
    return 1 if status.member_id == status.leader_id else 0


def levels(state: dict[str, Any], level: str) -> dict[str, str]:
    """The sentences of one level, by check."""
    return {one["check"]: one["sentence"] for one in state["findings"] if one["level"] == level}


async def left_behind(endpoint: str) -> list[str]:
    store = PatientEtcdStore([endpoint])
    try:
        return [kv.key for kv in (await store.range("/muster/", prefix=True)).kvs]
    finally:
        await store.close()


async def test_the_embedded_store_is_no_fault_and_keeps_nothing_of_it() -> None:
    async with EmbeddedServer() as server:

        async def scenario() -> None:
            ended, state = await doctor(server.endpoint)
            assert ended.status == 0
            assert levels(state, "fault") == {}
            assert "keeps nothing" in levels(state, "warning")["version"]
            assert "renew a lease, delete" in levels(state, "ok")["rights"]
            assert state["endpoints"][0]["read_p99_s"] < 1
            assert await left_behind(server.endpoint) == []
            assert list(server.engine.leases) == []

        await repeatedly(scenario)


async def test_compaction_is_seen_without_going_through_the_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A watch from the first revision on makes etcd read all of it, and nobody may write."""
    async with EmbeddedServer() as server:
        starts: list[int] = []
        watch = server.engine.watch

        def recorded(interval: Interval, start: int, wake: Callable[[], None]) -> Watcher:
            starts.append(start)
            return watch(interval, start, wake)

        monkeypatch.setattr(server.engine, "watch", recorded)
        store = PatientEtcdStore([server.endpoint])
        for _ in range(20):
            last = await store.txn([], [Put("/a", b"")])

        async def not_yet() -> None:
            _, state = await doctor(server.endpoint)
            assert "revisions was compacted yet" in levels(state, "note")["compaction"]

        async def compacted() -> None:
            _, state = await doctor(server.endpoint)
            assert levels(state, "ok")["compaction"].startswith("the history was compacted")

        await repeatedly(not_yet)
        assert min(starts) >= last.revision
        await store.compact(last.revision - 5)
        await repeatedly(compacted)
        await store.close()


async def test_for_people_it_says_what_to_do() -> None:
    async with EmbeddedServer() as server:

        async def scenario() -> None:
            ended = await examined("--etcd-endpoints", server.endpoint)
            assert ended.status == 0
            assert "\n                     -> " in ended.out
            assert ended.out.splitlines()[-1].endswith("warning") or "warnings" in ended.out

        await repeatedly(scenario)


async def test_nobody_there_is_another_status() -> None:
    ended, state = await doctor("127.0.0.1:1")
    assert ended.status == 69
    assert "127.0.0.1:1 does not answer" in levels(state, "fault")["endpoint"]


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
    async def scenario(attempt: int) -> None:
        engine, faults = MemoryEngine(), Stopping()
        monkeypatch.setattr(examine, "open_store", lambda _: MemoryStore(engine, faults=faults))
        report = await examine.endpoint_report(Access(("a:1",)), JobKeys("team", "digits"))
        assert len(report.reads_s) == 11
        assert report.reads_s[-1] >= 0.5
        assert report.error == f"no answer in {report.reads_s[-1]:.1f} s"
        assert not report.away

    monkeypatch.setattr(examine, "READS_TIMEOUT_S", 2.0)
    await calmly(scenario)


@pytest.mark.etcd
def test_three_members_one_of_them_frozen_or_not_named() -> None:
    async def all_named() -> None:
        ended, state = await doctor(*cluster.endpoints)
        assert ended.status == 0
        assert levels(state, "ok")["cluster"] == "all 3 members were reached"
        assert "authentication is off" in levels(state, "warning")["access"]
        assert len({one["member_id"] for one in state["endpoints"]}) == 3
        assert {one["db_quota_bytes"] for one in state["endpoints"]} == {2 * 1024**3}

    async def one_named() -> None:
        _, state = await doctor(cluster.endpoints[0])
        assert "no endpoint reaches m1, m2" in levels(state, "warning")["cluster"]

    async def one_frozen() -> None:
        ended, state = await doctor(*cluster.endpoints)
        assert ended.status == 1
        (sentence,) = levels(state, "fault").values()
        assert sentence.startswith(f"{cluster.endpoints[frozen]} does not answer")
        assert "rights" in levels(state, "ok")
        assert await left_behind(cluster.endpoints[frozen - 1]) == []

    with EtcdCluster() as cluster:
        asyncio.run(repeatedly(all_named))
        asyncio.run(repeatedly(one_named))
        # Without the leader there would be more to tell, until another is elected.
        frozen = asyncio.run(a_follower(cluster))
        cluster.freeze(frozen)
        asyncio.run(repeatedly(one_frozen))


@pytest.mark.etcd
@pytest.mark.long
def test_without_most_of_its_members_a_store_has_no_leader() -> None:
    async def scenario() -> None:
        ended, state = await doctor(cluster.endpoints[0])
        assert ended.status == 69
        told = [one for one in state["findings"] if one["level"] == "fault"]
        assert "see that most members of the store run" in told[0]["remedy"]

    with EtcdCluster() as cluster:
        cluster.kill(1)
        cluster.kill(2)
        asyncio.run(repeatedly(scenario))


@pytest.mark.etcd
def test_a_store_without_room_is_a_fault_and_says_so() -> None:
    async def fill(endpoint: str) -> None:
        store = PatientEtcdStore([endpoint])
        try:
            async with asyncio.timeout(120):
                for number in count():
                    try:
                        await store.txn([], [Put(f"/filler/{number}", bytes(500_000))])
                    except StoreFull:
                        return
                    except (StoreAmbiguous, StoreUnavailable):
                        continue
        finally:
            await store.close()

    async def scenario() -> None:
        ended, state = await doctor(*cluster.endpoints)
        assert ended.status == 1
        faults = levels(state, "fault")
        assert "NOSPACE" in faults["alarm"]
        assert "quota of 16.8 MB" in faults["size"]
        assert "not possible to" in faults["rights"]
        (remedy,) = [one["remedy"] for one in state["findings"] if one["check"] == "alarm"]
        assert "etcdctl alarm disarm" in remedy

    with EtcdCluster(1, arguments=("--quota-backend-bytes=16777216",)) as cluster:
        asyncio.run(fill(cluster.endpoints[0]))
        asyncio.run(repeatedly(scenario))


@pytest.mark.etcd
@pytest.mark.long
def test_compaction_is_seen() -> None:
    async def write(endpoint: str) -> None:
        store = PatientEtcdStore([endpoint])
        try:
            for number in range(20):
                last = await store.txn([], [Put("/a", b"%d" % number)])
            await store.compact(last.revision - 5)
        finally:
            await store.close()

    async def scenario() -> None:
        _, state = await doctor(*cluster.endpoints)
        assert levels(state, "ok")["compaction"].startswith("the history was compacted")

    with EtcdCluster(1) as cluster:
        asyncio.run(write(cluster.endpoints[0]))
        asyncio.run(repeatedly(scenario))


@pytest.mark.etcd
def test_a_store_that_does_not_let_us_in_or_lets_us_only_read(tmp_path: Path) -> None:
    prefix = "/muster/v1/default/digits/"
    password = tmp_path / "password"
    password.write_text("reader-pw\n")
    password.chmod(0o600)
    login = {"MUSTER_ETCD_USER": "reader", "MUSTER_ETCD_PASSWORD_FILE": str(password)}

    async def without_a_user() -> None:
        ended, state = await doctor(*cluster.endpoints)
        assert ended.status == 1
        assert "not possible to read" in levels(state, "fault")["rights"]
        assert "user name is empty" in levels(state, "fault")["rights"]
        assert state["authenticated"] is True

    async def with_one_who_reads() -> None:
        ended, state = await doctor(*cluster.endpoints, **login)
        assert ended.status == 1
        assert "not possible to write" in levels(state, "fault")["rights"]
        assert "permission denied" in levels(state, "fault")["rights"]
        assert state["endpoints"][0]["read_p50_s"] is not None

    async def with_a_wrong_password() -> None:
        ended, state = await doctor(*cluster.endpoints, **login)
        assert ended.status == 1
        assert "refuses this client" in levels(state, "fault")["endpoint"]

    with EtcdCluster(1) as cluster:
        cluster.etcdctl("user", "add", "reader", "--interactive=false", stdin="reader-pw")
        cluster.etcdctl("role", "add", "reading")
        cluster.etcdctl("role", "grant-permission", "reading", "read", prefix, "--prefix")
        cluster.etcdctl("user", "grant-role", "reader", "reading")
        cluster.enable_auth()
        asyncio.run(repeatedly(without_a_user))
        asyncio.run(repeatedly(with_one_who_reads))
        password.write_text("wrong")
        asyncio.run(repeatedly(with_a_wrong_password))


@pytest.mark.etcd
def test_a_user_with_the_jobs_own_role_has_all_that_is_needed(tmp_path: Path) -> None:
    secrets = {"root": "root-password", "job": "of-the-job"}
    for name, secret in secrets.items():
        (tmp_path / name).write_text(secret)
        (tmp_path / name).chmod(0o600)
    login = {
        "MUSTER_ETCD_USER": "digits",
        "MUSTER_ETCD_PASSWORD_FILE": str(tmp_path / "job"),
    }
    told: list[str] = []

    async def scenario() -> None:
        ended, state = await doctor(*cluster.endpoints, **login)
        told.append(ended.out + ended.err)
        assert ended.status == 0
        assert levels(state, "warning") == {}
        assert levels(state, "ok")["access"] == "authentication is on"

    with EtcdCluster(1) as cluster:
        cluster.enable_auth(secrets["root"])
        made = asyncio.run(
            muster(
                *("store-role", "digits", "--apply", "--user", "digits"),
                *("--new-password-file", str(tmp_path / "job")),
                MUSTER_ETCD_ENDPOINTS=cluster.endpoints[0],
                MUSTER_ETCD_USER="root",
                MUSTER_ETCD_PASSWORD_FILE=str(tmp_path / "root"),
            )
        )
        assert made.status == 0, made.err
        asyncio.run(repeatedly(scenario))
    assert all(secrets["job"] not in one for one in told)
