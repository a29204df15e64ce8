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


def found(report: Report, check: str) -> Finding:
    """The worst finding of a check."""
    order = ("fault", "warning", "note", "ok")
    of_check = [finding for finding in diagnose(report) if finding.check == check]
    return min(of_check, key=lambda finding: order.index(finding.level))


def with_status(**changes: object) -> Report:
    status = replace(STATUS, **changes)  # type: ignore[arg-type]
    return replace(WELL, endpoints=(replace(WELL.endpoints[0], status=status),))


def test_a_store_in_order_has_nothing_to_be_done() -> None:
    findings = diagnose(WELL)
    assert {finding.level for finding in findings} == {"ok"}
    assert {finding.remedy for finding in findings} == {""}
    assert [finding.check for finding in findings] == [
        *("version", "latency", "cluster", "size", "compaction", "rights", "latency", "access")
    ]


def test_whatever_is_wrong_says_what_to_do() -> None:
    reports = [
        with_status(errors=("memberID:1 alarm:NOSPACE ",)),
        with_status(errors=("memberID:1 alarm:CORRUPT ",)),
        with_status(errors=("etcdserver: no leader",)),
        with_status(version="3.5.1", learner=True, db_size_bytes=2 * GB),
        replace(WELL, rights=RightsReport(("read",), "write", "no room"), authenticated=False),
        replace(WELL, encrypted=False, compacted=False, members=(EtcdMember(9, "m9"),)),
    ]
    for report in reports:
        bad = [finding for finding in diagnose(report) if finding.level != "ok"]
        assert bad
        assert all(finding.remedy for finding in bad), bad


@pytest.mark.parametrize(
    ("error", "part", "remedy"),
    [
        ("memberID:1 alarm:NOSPACE ", "NOSPACE", "alarm disarm"),
        ("memberID:1 alarm:CORRUPT ", "CORRUPT", "backup"),
        ("etcdserver: no leader", "no leader", "most members"),
    ],
)
def test_an_alarm_is_a_fault(error: str, part: str, remedy: str) -> None:
    finding = found(with_status(errors=(error,)), "alarm")
    assert finding.level == "fault"
    assert part in finding.sentence
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("one", "part"),
    [
        (EndpointReport("a:1", error="connection refused"), "does not answer"),
        (EndpointReport("a:1", error="no such user", refused=True), "refuses this client"),
        (EndpointReport("a:1", error="etcdserver: no leader"), "has no leader"),
        (EndpointReport("a:1", replace(STATUS, learner=True)), "learner"),
    ],
)
def test_an_endpoint_that_serves_nobody_is_a_fault(one: EndpointReport, part: str) -> None:
    finding = found(replace(WELL, endpoints=(one,)), "endpoint")
    assert finding.level == "fault"
    assert part in finding.sentence


@pytest.mark.parametrize(
    ("slowest_s", "level"), [(0.01, "ok"), (0.1, "warning"), (0.6, "fault"), (None, "fault")]
)
def test_slow_reads(slowest_s: float | None, level: str) -> None:
    reads = () if slowest_s is None else (*(0.001,) * 49, slowest_s)
    error = "no answer within 3 s" if slowest_s is None else ""
    one = EndpointReport("a:1", STATUS, error=error, reads_s=reads)
    assert found(replace(WELL, endpoints=(one,)), "latency").level == level


def test_an_endpoint_that_stops_answering_is_a_fault_beside_its_latency() -> None:
    one = EndpointReport("a:1", STATUS, error="no answer in 2.9 s", reads_s=(*(0.001,) * 49, 2.9))
    findings = diagnose(replace(WELL, endpoints=(one,)))
    faults = {finding.check: finding for finding in findings if finding.level == "fault"}
    assert faults["endpoint"].sentence == "a:1 answered, then stopped: no answer in 2.9 s"
    assert faults["endpoint"].remedy
    assert "p99 2900.0 ms" in faults["latency"].sentence


@pytest.mark.parametrize(("write_s", "level"), [(0.1, "ok"), (0.3, "warning"), (0.9, "fault")])
def test_slow_writes(write_s: float, level: str) -> None:
    report = replace(WELL, rights=replace(WELL.rights, write_s=write_s))
    assert found(report, "latency").level == level


@pytest.mark.parametrize(
    ("size", "quota", "level"),
    [
        (1.3 * GB, 2 * GB, "ok"),
        (1.5 * GB, 2 * GB, "warning"),
        (1.9 * GB, 2 * GB, "fault"),
        (1.9 * GB, 8 * GB, "ok"),
        (1.9 * GB, 0, "warning"),  # older than 3.6: it does not tell, 2 GiB is the default
    ],
)
def test_size_beside_the_quota(size: float, quota: int, level: str) -> None:
    report = with_status(db_size_bytes=int(size), db_quota_bytes=quota)
    finding = found(report, "size")
    assert finding.level == level
    assert ("does not tell" in finding.sentence) == (quota == 0)


@pytest.mark.parametrize(
    ("compacted", "revision", "level"),
    [(False, 500, "note"), (False, 20_000, "warning"), (True, 20_000, "ok")],
)
def test_a_history_that_only_grows_is_told(*, compacted: bool, revision: int, level: str) -> None:
    report = replace(with_status(revision=revision), compacted=compacted)
    assert found(report, "compaction").level == level


def test_compaction_that_cannot_be_seen_is_not_told() -> None:
    report = replace(WELL, compacted=None)
    assert "compaction" not in {finding.check for finding in diagnose(report)}


def test_endpoints_of_two_stores_are_a_fault() -> None:
    other = EndpointReport("b:1", replace(STATUS, endpoint="b:1", cluster_id=8))
    finding = found(replace(WELL, endpoints=(*WELL.endpoints, other)), "cluster")
    assert finding.level == "fault"
    assert "a:1 to 7" in finding.sentence


def test_a_member_that_nobody_named_is_told() -> None:
    members = (EtcdMember(1, "m1"), EtcdMember(2, "m2"), EtcdMember(255, ""))
    finding = found(replace(WELL, members=members), "cluster")
    assert finding.level == "warning"
    assert "ff, m2" in finding.sentence


def test_one_that_was_named_and_does_not_answer_is_told_once() -> None:
    away = EndpointReport("b:1", error="connection refused")
    report = replace(
        WELL, endpoints=(*WELL.endpoints, away), members=(EtcdMember(1, "m1"), EtcdMember(2, "m2"))
    )
    bad = [finding for finding in diagnose(report) if finding.level != "ok"]
    assert [finding.check for finding in bad] == ["endpoint"]


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({"authenticated": False}, "warning"),
        ({"authenticated": False, "local": True}, "ok"),
        ({"encrypted": False}, "warning"),
        ({"encrypted": False, "local": True}, "ok"),
    ],
)
def test_a_store_that_is_open_is_warned_of(changes: dict[str, bool], level: str) -> None:
    findings = diagnose(replace(WELL, **changes))  # type: ignore[arg-type]
    assert {one.level for one in findings if one.check == "access"} <= {level, "ok"}
    assert (level == "ok") == all(one.level == "ok" for one in findings)


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


@pytest.mark.parametrize(
    ("seen", "check", "level", "words"),
    [
        (replace(CLUSTER_WELL, server_version="v1.28.9"), "version", "fault", "native sidecars"),
        (replace(CLUSTER_WELL, hooks=()), "chart", "fault", "no webhook"),
        (
            replace(CLUSTER_WELL, hooks=(HOOK, replace(HOOK, configuration="other"))),
            "chart",
            "warning",
            "other",
        ),
        (
            replace(CLUSTER_WELL, controllers=(replace(PART, ready=0),)),
            "controller",
            "fault",
            "without Muster",
        ),
        (
            replace(CLUSTER_WELL, controllers=(replace(PART, ready=1),)),
            "controller",
            "warning",
            "1 of 2",
        ),
        (
            replace(CLUSTER_WELL, hooks=(replace(HOOK, trusted=False),)),
            "webhook",
            "fault",
            "caBundle",
        ),
        (replace(CLUSTER_WELL, probe=Probe()), "webhook", "fault", "no sidecar"),
        (replace(CLUSTER_WELL, probe=Probe(error="no right")), "webhook", "warning", "no right"),
        (replace(CLUSTER_WELL, certificates={CERTIFICATE: NOW}), "certificate", "fault", "is over"),
        (
            replace(CLUSTER_WELL, certificates={CERTIFICATE: NOW + timedelta(days=13)}),
            "certificate",
            "warning",
            "2026-12-06",
        ),
        (replace(CLUSTER_WELL, stores=(replace(STORE, ready=2),)), "etcd", "warning", "2 of 3"),
        (replace(CLUSTER_WELL, stores=(replace(STORE, ready=1),)), "etcd", "fault", "no write"),
        (
            replace(CLUSTER_WELL, stores=(replace(STORE, wanted=0, ready=0),)),
            "etcd",
            "fault",
            "no write",
        ),
        (
            replace(
                CLUSTER_WELL, pods=(POD, replace(POD, name="b", sidecar="example.org/s:0.1.0"))
            ),
            "sidecars",
            "note",
            "s:0.1.0",
        ),
        (replace(CLUSTER_WELL, pods=(POD, LATE)), "injection", "warning", "team/digits-1"),
        (
            replace(CLUSTER_WELL, pods=(replace(POD, missing="digits-etcd"),)),
            "access",
            "fault",
            "no Secret digits-etcd",
        ),
        (
            replace(CLUSTER_WELL, pods=(replace(POD, immutable="digits-muster-store"), POD)),
            "access",
            "warning",
            "Secret digits-muster-store of namespace team is immutable",
        ),
        (replace(CLUSTER_WELL, secrets_left=12), "access", "note", "12 Secrets"),
        (
            replace(CLUSTER_WELL, renewed={"node-a": NOW + timedelta(seconds=5)}),
            "clocks",
            "warning",
            "5 s ahead of",
        ),
        (
            replace(CLUSTER_WELL, renewed={"node-a": NOW - timedelta(seconds=90)}),
            "clocks",
            "warning",
            "away, or its clock is behind",
        ),
        (
            replace(CLUSTER_WELL, probe=Probe(True, server_time=NOW - timedelta(seconds=20))),
            "clocks",
            "warning",
            "20 s behind",
        ),
        (replace(CLUSTER_WELL, unread={"etcd": "403"}), "etcd", "note", "403"),
        (
            replace(CLUSTER_WELL, leaders=("muster-etcd-0", "muster-etcd-2")),
            "stores",
            "fault",
            "different stores: muster-etcd-0, muster-etcd-2",
        ),
    ],
)
def test_each_fault_is_told_by_itself(seen: Cluster, check: str, level: str, words: str) -> None:
    ((told, weight, sentence),) = said(seen)
    assert (told, weight) == (check, level)
    assert words in sentence


def test_secrets_that_pods_wait_for_are_read_before_those_of_pods_that_run() -> None:
    """Only so many are read, and one that is not there is a fault of a pending pod alone."""

    def pod(namespace: str, phase: str) -> dict[str, Any]:
        volume = {"name": "muster-etcd", "secret": {"secretName": "digits-muster-store"}}
        metadata = {"namespace": namespace, "name": "digits-0"}
        return {"metadata": metadata, "spec": {"volumes": [volume]}, "status": {"phase": phase}}

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

    async def get(self, path: str) -> dict[str, Any]:
        if path.startswith("/api/v1/pods?"):
            return {"items": [self._pod("closed"), self._pod("open")]}
        if path.startswith("/api/v1/namespaces/closed/secrets/"):
            raise ClusterRefused("secrets is forbidden", 403)
        if path.startswith("/api/v1/namespaces/open/secrets/"):
            raise ClusterRefused("not found", 404)
        return {"gitVersion": "v1.36.3"} if path == "/version" else {}

    def _pod(self, namespace: str) -> dict[str, Any]:
        volume = {"name": "muster-etcd", "secret": {"secretName": "digits-muster-store"}}
        return {
            "metadata": {"namespace": namespace, "name": "digits-0"},
            "spec": {"volumes": [volume]},
            "status": {"phase": "Pending"},
        }


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

    async def get(self, path: str) -> dict[str, Any]:
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
