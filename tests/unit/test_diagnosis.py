# SPDX-License-Identifier: Apache-2.0
"""What the doctor makes of what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from console.doctor.diagnosis import diagnose
from console.doctor.report import EndpointReport, EtcdMember, Finding, Report, RightsReport
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
        *("version", "latency", "cluster", "size", "compaction", "rights", "latency", "access"),
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
