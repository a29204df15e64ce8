# SPDX-License-Identifier: Apache-2.0
"""What the doctor makes of what was measured, of a store and of a cluster."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from console.doctor.cluster_findings import AskingPod, ChartPart, Cluster, Hook, Probe, findings_of
from console.doctor.diagnosis import EndpointReport, EtcdMember, Report, RightsReport, diagnose
from console.doctor.in_cluster import SECRETS_MOST, examine_cluster, needed_secrets
from console.doctor.job import Finding
from rdzv.errors import ClusterRefused, ClusterUnavailable
from rdzv.store import StoreStatus

GB = 1_000_000_000
STATUS = StoreStatus("a:1", "3.6.16", 7, 1, 1, 500, 1_000_000, 500_000, db_quota_bytes=2 * GB)
WELL = Report(
    endpoints=(EndpointReport("a:1", STATUS, reads_s=(0.002,) * 50),),
    rights=RightsReport(("read", "write"), write_s=0.003, watch_s=0.004),
    members=(EtcdMember(1, "m1"),),
    authenticated=True,
    compacted=True,
    encrypted=True,
    now_unix_s=1000.0,
)


def judged(report: Report, check: str) -> Finding | None:
    """The worst finding of a check; what is not in order says what to do, or is a note on it."""
    order = ("fault", "warning", "note", "ok")
    findings = diagnose(report)
    assert all(one.remedy for one in findings if one.level in order[:2])
    of_check = [one for one in findings if one.check == check]
    return min(of_check, key=lambda one: order.index(one.level), default=None)


def with_status(**changes: object) -> Report:
    status = replace(STATUS, **changes)  # type: ignore[arg-type]
    return replace(WELL, endpoints=(replace(WELL.endpoints[0], status=status),))


def reached(error: str = "", reads_s: tuple[float, ...] = (), **more: Any) -> Report:
    return replace(WELL, endpoints=(EndpointReport("a:1", error=error, reads_s=reads_s, **more),))


def read_in(slowest_s: float) -> tuple[float, ...]:
    return (*(0.001,) * 49, slowest_s)


def written_in(write_s: float) -> Report:
    return replace(WELL, rights=replace(WELL.rights, write_s=write_s))


def of_size(gigabytes: float, quota: int) -> Report:
    return with_status(db_size_bytes=int(gigabytes * GB), db_quota_bytes=quota * GB)


def listing(*members: EtcdMember) -> Report:
    return replace(WELL, members=(EtcdMember(1, "m1"), *members))


def compacting(revision: int, *, compacted: bool | None) -> Report:
    return replace(with_status(revision=revision), compacted=compacted)


TWO_STORES = (*WELL.endpoints, EndpointReport("b:1", replace(STATUS, endpoint="b:1", cluster_id=8)))
DENIED = RightsReport(("read",), "write", "no room")


def test_a_store_in_order_has_nothing_to_be_done() -> None:
    findings = diagnose(WELL)
    assert {(finding.level, finding.remedy) for finding in findings} == {("ok", "")}
    assert [finding.check for finding in findings] == [
        *("version", "latency", "cluster", "size", "compaction", "rights", "latency", "access")
    ]


@pytest.mark.parametrize(
    ("report", "check", "level", "words"),
    [
        (with_status(version="3.5.1"), "version", "fault", "3.5.1"),
        (with_status(errors=("memberID:1 alarm:NOSPACE ",)), "alarm", "fault", "NOSPACE"),
        (with_status(errors=("memberID:1 alarm:CORRUPT ",)), "alarm", "fault", "CORRUPT"),
        (with_status(errors=("etcdserver: no leader",)), "alarm", "fault", "no leader"),
        (reached("connection refused"), "endpoint", "fault", "does not answer"),
        (reached("no such user", refused=True), "endpoint", "fault", "refuses this client"),
        (reached("etcdserver: no leader"), "endpoint", "fault", "has no leader"),
        (with_status(learner=True), "endpoint", "fault", "learner"),
        (reached("no answer within 3 s", status=STATUS), "latency", "fault", "no read comes back"),
        (reached(status=STATUS, reads_s=read_in(0.01)), "latency", "ok", ""),
        (reached(status=STATUS, reads_s=read_in(0.1)), "latency", "warning", "p99 100.0 ms"),
        (reached(status=STATUS, reads_s=read_in(0.6)), "latency", "fault", "p99 600.0 ms"),
        (written_in(0.1), "latency", "ok", ""),
        (written_in(0.3), "latency", "warning", "a write took 300.0 ms"),
        (written_in(0.9), "latency", "fault", "a write took 900.0 ms"),
        (of_size(1.3, 2), "size", "ok", ""),
        (of_size(1.5, 2), "size", "warning", "of a quota of 2000.0 MB"),
        (of_size(1.9, 2), "size", "fault", ""),
        (of_size(1.9, 8), "size", "ok", ""),
        # Older than 3.6: it does not tell, 2 GiB is the default.
        (of_size(1.9, 0), "size", "warning", "does not tell"),
        (compacting(500, compacted=False), "compaction", "note", "yet"),
        (compacting(20_000, compacted=False), "compaction", "warning", "only grows"),
        (compacting(20_000, compacted=True), "compaction", "ok", ""),
        (replace(WELL, endpoints=TWO_STORES), "cluster", "fault", "a:1 to 7"),
        (listing(EtcdMember(2, "m2"), EtcdMember(255, "")), "cluster", "warning", "ff, m2"),
        (replace(WELL, rights=DENIED), "rights", "fault", "not possible to write: no room"),
        (replace(WELL, authenticated=False), "access", "warning", "authentication is off"),
        (replace(WELL, encrypted=False), "access", "warning", "not encrypted"),
        (replace(WELL, encrypted=False, local=True), "access", "ok", "is on"),
    ],
)
def test_the_store_is_judged(report: Report, check: str, level: str, words: str) -> None:
    finding = judged(report, check)
    assert finding is not None
    assert finding.level == level
    assert words in finding.sentence


@pytest.mark.parametrize(
    ("report", "check"),
    [
        (compacting(20_000, compacted=None), "compaction"),
        (replace(WELL, authenticated=False, local=True), "access"),
    ],
    ids=["what cannot be seen", "what no other pod reaches"],
)
def test_what_is_not_judged(report: Report, check: str) -> None:
    assert judged(report, check) is None


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("memberID:1 alarm:NOSPACE ", "alarm disarm"),
        ("memberID:1 alarm:CORRUPT ", "from a backup"),
        ("etcdserver: no leader", "most members"),
    ],
)
def test_an_alarm_has_a_cure(error: str, remedy: str) -> None:
    finding = judged(with_status(errors=(error,)), "alarm")
    assert finding is not None
    assert remedy in finding.remedy


def test_an_endpoint_that_stops_answering_is_a_fault_beside_its_latency() -> None:
    report = reached("no answer in 2.9 s", read_in(2.9), status=STATUS)
    endpoint, latency = judged(report, "endpoint"), judged(report, "latency")
    assert endpoint is not None
    assert latency is not None
    assert endpoint.sentence == "a:1 answered, then stopped: no answer in 2.9 s"
    assert "p99 2900.0 ms" in latency.sentence


def test_one_that_was_named_and_does_not_answer_is_told_once() -> None:
    away = EndpointReport("b:1", error="connection refused")
    report = replace(listing(EtcdMember(2, "m2")), endpoints=(*WELL.endpoints, away))
    bad = [finding for finding in diagnose(report) if finding.level != "ok"]
    assert [finding.check for finding in bad] == ["endpoint"]


def test_the_embedded_store_is_one_note() -> None:
    embedded = with_status(version="3.6.0+memory")
    report = replace(embedded, compacted=False, authenticated=False, encrypted=False, local=True)
    noise = [finding for finding in diagnose(report) if finding.level != "ok"]
    assert [(one.check, one.level) for one in noise] == [("version", "note")]


NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
SIDECAR = "example.org/muster-sidecar:0.2.0"
POD = AskingPod("team", "digits-0", "Running", SIDECAR)
LATE = replace(POD, name="digits-1", sidecar=None)
PART = ChartPart("muster-controller", 2, 2, "example.org/muster-controller:0.2.0", "muster-0.2.0")
STORE = ChartPart("muster-etcd", 3, 3, "etcd:v3.6.16", "muster-0.2.0")
CERTIFICATE = "Secret muster-controller, tls.crt"
HOOK = Hook("muster-controller-muster-system", "muster-system", "muster-controller", True)
CLUSTER_WELL = Cluster(
    now=NOW,
    server_version="v1.36.3",
    hooks=(HOOK,),
    controllers=(PART,),
    stores=(STORE,),
    leaders=("muster-etcd-1",),
    certificates={CERTIFICATE: NOW + timedelta(days=60)},
    probe=Probe(injected=True, server_time=NOW - timedelta(seconds=1)),
    pods=(POD,),
    renewed={"node-a": NOW - timedelta(seconds=9)},
)


def said(seen: Cluster) -> list[tuple[str, str, str]]:
    """What is not in order: check, level and sentence; each has a remedy, or is a note."""
    found = [one for one in findings_of(seen) if one.level != "ok"]
    assert all(one.remedy for one in found)
    return [(one.check, one.level, one.sentence) for one in found]


def test_where_all_is_well_everything_is_told_to_be() -> None:
    assert said(CLUSTER_WELL) == []
    assert [one.check for one in findings_of(CLUSTER_WELL)] == [
        *("version", "controller", "webhook", "certificate", "etcd", "sidecars", "clocks")
    ]


OLD = replace(POD, name="b", sidecar="example.org/s:0.1.0")
HELD = replace(POD, immutable="digits-muster-store")


def renewed(ago_s: float) -> dict[str, Any]:
    return {"renewed": {"node-a": NOW - timedelta(seconds=ago_s)}}


def valid_for(days: int) -> dict[str, Any]:
    return {"certificates": {CERTIFICATE: NOW + timedelta(days=days)}}


@pytest.mark.parametrize(
    ("changes", "check", "level", "words"),
    [
        ({"server_version": "v1.28.9"}, "version", "fault", "native sidecars"),
        ({"hooks": ()}, "chart", "fault", "no webhook"),
        ({"hooks": (HOOK, replace(HOOK, configuration="other"))}, "chart", "warning", "other"),
        ({"controllers": (replace(PART, ready=0),)}, "controller", "fault", "without Muster"),
        ({"controllers": (replace(PART, ready=1),)}, "controller", "warning", "1 of 2"),
        ({"hooks": (replace(HOOK, trusted=False),)}, "webhook", "fault", "caBundle"),
        ({"probe": Probe()}, "webhook", "fault", "no sidecar"),
        ({"probe": Probe(error="no right")}, "webhook", "warning", "no right"),
        (valid_for(0), "certificate", "fault", "is over"),
        (valid_for(13), "certificate", "warning", "2026-12-06"),
        ({"stores": (replace(STORE, ready=2),)}, "etcd", "warning", "2 of 3"),
        ({"stores": (replace(STORE, ready=1),)}, "etcd", "fault", "no write"),
        ({"stores": (replace(STORE, wanted=0, ready=0),)}, "etcd", "fault", "no write"),
        ({"unread": {"etcd": "403"}}, "etcd", "note", "403"),
        ({"leaders": ("etcd-0", "etcd-2")}, "stores", "fault", "different stores: etcd-0, etcd-2"),
        ({"pods": (POD, OLD)}, "sidecars", "note", "s:0.1.0"),
        ({"pods": (POD, LATE)}, "injection", "warning", "team/digits-1"),
        ({"pods": (replace(POD, missing="d-etcd"),)}, "access", "fault", "no Secret d-etcd"),
        ({"pods": (HELD, POD)}, "access", "warning", "store of namespace team is immutable"),
        ({"secrets_left": 12}, "access", "note", "12 Secrets"),
        (renewed(-5), "clocks", "warning", "5 s ahead of"),
        (renewed(90), "clocks", "warning", "away, or its clock is behind"),
        (
            {"probe": Probe(True, server_time=NOW - timedelta(seconds=20))},
            "clocks",
            "warning",
            "20 s behind",
        ),
    ],
)
def test_each_fault_is_told_by_itself(
    changes: dict[str, Any], check: str, level: str, words: str
) -> None:
    ((told, weight, sentence),) = said(replace(CLUSTER_WELL, **changes))
    assert (told, weight) == (check, level)
    assert words in sentence


def pod(namespace: str, phase: str) -> dict[str, Any]:
    volume = {"name": "muster-etcd", "secret": {"secretName": "digits-muster-store"}}
    metadata = {"namespace": namespace, "name": "digits-0"}
    return {"metadata": metadata, "spec": {"volumes": [volume]}, "status": {"phase": phase}}


def test_secrets_that_pods_wait_for_are_read_before_those_of_pods_that_run() -> None:
    """Only so many are read, and one that is not there is a fault of a pending pod alone."""

    running = [pod(f"team-{number:02}", "Running") for number in range(SECRETS_MOST)]
    needed = needed_secrets([*running, pod("zeta", "Running"), pod("zeta", "Pending")])
    assert needed[0] == ("zeta", "digits-muster-store")
    assert needed[1:] == [(f"team-{n:02}", "digits-muster-store") for n in range(SECRETS_MOST)]


def test_an_api_server_that_takes_long_to_answer_has_no_clock_that_is_behind() -> None:
    then = NOW - timedelta(seconds=20)
    assert said(replace(CLUSTER_WELL, probe=Probe(True, server_time=then, asked=then))) == []


def test_pods_that_started_while_the_webhook_was_away_are_named_with_what_to_type() -> None:
    pods = tuple(replace(LATE, name=f"digits-{n}") for n in range(9))
    ((*_, sentence),) = said(replace(CLUSTER_WELL, pods=(POD, *pods)))
    assert "9 pods" in sentence
    assert "team/digits-4 and 4 more" in sentence
    (finding,) = [
        one for one in findings_of(replace(CLUSTER_WELL, pods=pods)) if one.check == "injection"
    ]
    assert "kubectl delete pod -n team digits-0" in finding.remedy


class Guarded:
    """An API server with two pending pods: the Secret of the one is not ours to read."""

    async def get(self, path: str, **_: object) -> dict[str, Any]:
        if path.startswith("/api/v1/pods?"):
            return {"items": [pod("closed", "Pending"), pod("open", "Pending")]}
        if path.startswith("/api/v1/namespaces/closed/secrets/"):
            raise ClusterRefused("secrets is forbidden", 403)
        if path.startswith("/api/v1/namespaces/open/secrets/"):
            raise ClusterRefused("not found", 404)
        return {"gitVersion": "v1.36.3"} if path == "/version" else {}


async def test_a_secret_that_may_not_be_read_is_noted_and_those_after_it_are_looked_at() -> None:
    api: Any = Guarded()
    seen = await examine_cluster(api, lambda: NOW)
    told = [one for one in said(seen) if one[0] == "access"]
    assert [level for _, level, _ in told] == ["fault", "note"]
    assert "namespace open has no Secret digits-muster-store" in told[0][2]
    assert told[1][2] == "not checked: secrets is forbidden"


class Split:
    """An API server of a release whose members 0 and 2 lead, as ``elected`` has it; 1 is away."""

    def __init__(self, *elected: set[int]) -> None:
        self._elected = list(elected)

    async def get(self, path: str, **_: object) -> dict[str, Any]:
        if path.startswith("/apis/admissionregistration.k8s.io/"):
            service = {"namespace": "muster-system", "name": "muster-controller"}
            hook = {"name": "pods.inject.muster.dev", "clientConfig": {"service": service}}
            return {"items": [{"metadata": {"name": "muster"}, "webhooks": [hook]}]}
        if path.startswith("/api/v1/namespaces/muster-system/pods?"):
            return {"items": [{"metadata": {"name": f"muster-etcd-{n}"}} for n in range(3)]}
        return {"gitVersion": "v1.36.3"} if path == "/version" else {}

    async def create(self, *_: object) -> dict[str, Any]:
        raise ClusterRefused("no right", 403)

    async def text(self, path: str) -> str:
        number = int(path.partition("muster-etcd-")[2][0])
        if number == 1:
            raise ClusterUnavailable("no endpoints available")
        leads = number in self._elected[0]
        if number == 2 and len(self._elected) > 1:
            del self._elected[0]
        return f"# TYPE x\netcd_server_is_leader {leads:d}\nrest 1\n"


@pytest.mark.parametrize(
    ("elected", "leaders"),
    [
        (({0, 2},), ("muster-etcd-0", "muster-etcd-2")),
        (({0, 2}, {2}), ("muster-etcd-2",)),
        (({0},), ("muster-etcd-0",)),
    ],
    ids=["two stores", "an election", "one store"],
)
async def test_members_that_lead_are_asked_of_etcd_itself(
    monkeypatch: pytest.MonkeyPatch, elected: tuple[set[int], ...], leaders: tuple[str, ...]
) -> None:
    monkeypatch.setattr("console.doctor.in_cluster.ELECTED_S", 0.0)
    api: Any = Split(*elected)
    assert (await examine_cluster(api, lambda: NOW)).leaders == leaders
