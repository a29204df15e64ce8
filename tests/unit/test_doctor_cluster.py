# SPDX-License-Identifier: Apache-2.0
"""What ``muster doctor --cluster`` says of what it has seen: each fault with what to do."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from console.doctor.cluster_findings import findings_of
from console.doctor.in_cluster import SECRETS_MOST, examine_cluster, needed_secrets
from console.doctor.report import AskingPod, ChartPart, Cluster, Hook, Probe
from rdzv.errors import ClusterRefused, ClusterUnavailable

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
SIDECAR = "example.org/muster-sidecar:0.2.0"
POD = AskingPod("team", "digits-0", "Running", SIDECAR)
LATE = replace(POD, name="digits-1", sidecar=None)
PART = ChartPart("muster-controller", 2, 2, "example.org/muster-controller:0.2.0", "muster-0.2.0")
STORE = ChartPart("muster-etcd", 3, 3, "etcd:v3.6.16", "muster-0.2.0")
CERTIFICATE = "Secret muster-controller, tls.crt"
HOOK = Hook("muster-controller-muster-system", "muster-system", "muster-controller", True)
WELL = Cluster(
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
    assert said(WELL) == []
    assert [one.check for one in findings_of(WELL)] == [
        *("version", "controller", "webhook", "certificate", "etcd", "sidecars", "clocks"),
    ]


@pytest.mark.parametrize(
    ("seen", "check", "level", "words"),
    [
        (replace(WELL, server_version="v1.28.9"), "version", "fault", "native sidecars"),
        (replace(WELL, hooks=()), "chart", "fault", "no webhook"),
        (
            replace(WELL, hooks=(HOOK, replace(HOOK, configuration="other"))),
            "chart",
            "warning",
            "other",
        ),
        (
            replace(WELL, controllers=(replace(PART, ready=0),)),
            "controller",
            "fault",
            "without Muster",
        ),
        (replace(WELL, controllers=(replace(PART, ready=1),)), "controller", "warning", "1 of 2"),
        (replace(WELL, hooks=(replace(HOOK, trusted=False),)), "webhook", "fault", "caBundle"),
        (replace(WELL, probe=Probe()), "webhook", "fault", "no sidecar"),
        (replace(WELL, probe=Probe(error="no right")), "webhook", "warning", "no right"),
        (replace(WELL, certificates={CERTIFICATE: NOW}), "certificate", "fault", "is over"),
        (
            replace(WELL, certificates={CERTIFICATE: NOW + timedelta(days=13)}),
            "certificate",
            "warning",
            "2026-12-06",
        ),
        (replace(WELL, stores=(replace(STORE, ready=2),)), "etcd", "warning", "2 of 3"),
        (replace(WELL, stores=(replace(STORE, ready=1),)), "etcd", "fault", "no write"),
        (replace(WELL, stores=(replace(STORE, wanted=0, ready=0),)), "etcd", "fault", "no write"),
        (
            replace(WELL, pods=(POD, replace(POD, name="b", sidecar="example.org/s:0.1.0"))),
            "sidecars",
            "note",
            "s:0.1.0",
        ),
        (replace(WELL, pods=(POD, LATE)), "injection", "warning", "team/digits-1"),
        (
            replace(WELL, pods=(replace(POD, missing="digits-etcd"),)),
            "access",
            "fault",
            "no Secret digits-etcd",
        ),
        (
            replace(WELL, pods=(replace(POD, immutable="digits-muster-store"), POD)),
            "access",
            "warning",
            "Secret digits-muster-store of namespace team is immutable",
        ),
        (replace(WELL, secrets_left=12), "access", "note", "12 Secrets"),
        (
            replace(WELL, renewed={"node-a": NOW + timedelta(seconds=5)}),
            "clocks",
            "warning",
            "5 s ahead of",
        ),
        (
            replace(WELL, renewed={"node-a": NOW - timedelta(seconds=90)}),
            "clocks",
            "warning",
            "away, or its clock is behind",
        ),
        (
            replace(WELL, probe=Probe(True, server_time=NOW - timedelta(seconds=20))),
            "clocks",
            "warning",
            "20 s behind",
        ),
        (replace(WELL, unread={"etcd": "403"}), "etcd", "note", "403"),
        (
            replace(WELL, leaders=("muster-etcd-0", "muster-etcd-2")),
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
    assert said(replace(WELL, probe=Probe(True, server_time=then, asked=then))) == []


def test_pods_that_started_while_the_webhook_was_away_are_named_with_what_to_type() -> None:
    pods = tuple(replace(LATE, name=f"digits-{n}") for n in range(9))
    ((*_, sentence),) = said(replace(WELL, pods=(POD, *pods)))
    assert "9 pods" in sentence
    assert "team/digits-4 and 4 more" in sentence
    (finding,) = [one for one in findings_of(replace(WELL, pods=pods)) if one.check == "injection"]
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
