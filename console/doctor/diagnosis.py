# SPDX-License-Identifier: Apache-2.0
"""Measurements of a store, and the findings about it and its job with their remedies: pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agent.verdict.states import Level
from agent.verdict.view import JobView
from console.doctor.job import Finding, explain
from console.job.reading import outage_cause
from rdzv.keys import JobKeys
from rdzv.sentences import named
from rdzv.store import StoreStatus
from rdzv.store.etcd.answers import FLOOR, NO_SPACE_CURE, is_embedded, judge_version

READ_WARNING_S, READ_FAULT_S = 0.1, 0.5
"""Limits of the slowest read: the next endpoint is tried after 1 s, or 1.8 s on a slow line."""

WRITE_WARNING_S, WRITE_FAULT_S = 0.25, 0.75

QUOTA_DEFAULT_BYTES = 2 * 1024**3
"""etcd's default quota, assumed if it does not report its own."""

SIZE_WARNING, SIZE_FAULT = 0.7, 0.9
"""Limits of the database size, as fractions of the quota."""

UNCOMPACTED_MAX = 10_000
"""The number of revisions by which a store with automatic compaction would have compacted."""

DO_COMPACTION = (
    "start etcd with --auto-compaction-mode=periodic --auto-compaction-retention=1h; see"
    " docs/operations.md#how-to-run-etcd-for-muster"
)


@dataclass(frozen=True, slots=True)
class EndpointReport:
    """One endpoint's answer. ``refused``: it answers, but denies access.

    ``reads_s`` is empty if no read came back; otherwise it includes the time spent on a read that
    failed or was given up.
    """

    endpoint: str
    status: StoreStatus | None = None
    error: str = ""
    refused: bool = False
    reads_s: tuple[float, ...] = ()

    @property
    def reached(self) -> bool:
        """Whether the endpoint answers at all, be it with a refusal."""
        return self.status is not None or self.refused

    @property
    def away(self) -> bool:
        """Whether no read succeeded there, for another reason than missing rights."""
        return bool(self.error) and not self.reads_s and not self.refused


@dataclass(frozen=True, slots=True)
class RightsReport:
    """The result of a probe under the job's prefix: the steps done, the failed one, its error.

    ``write_s`` is the duration of a write, ``watch_s`` the time from its start until the watch
    showed it.
    """

    done: tuple[str, ...] = ()
    failed: str = ""
    error: str = ""
    write_s: float | None = None
    watch_s: float | None = None


@dataclass(frozen=True, slots=True)
class EtcdMember:
    """One member of the cluster, as the cluster lists it."""

    member_id: int
    name: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was measured.

    ``members``, ``authenticated``, ``job`` and ``compacted`` (whether any of the history was) are
    None if the store does not tell. ``encrypted``: the connections use TLS; ``local``: they stay
    on this machine. ``others``: the jobs that the store has, if it does not have this one.
    """

    endpoints: tuple[EndpointReport, ...]
    rights: RightsReport
    members: tuple[EtcdMember, ...] | None = None
    authenticated: bool | None = None
    compacted: bool | None = None
    job: JobView | None = None
    others: tuple[JobKeys, ...] = ()
    encrypted: bool = False
    local: bool = False
    now_unix_s: float = 0.0


def diagnose(report: Report) -> list[Finding]:
    """Return the findings about the store, then the job, in the order of ``docs/stuck.md``."""
    findings = [finding for one in report.endpoints for finding in _endpoint(one)]
    statuses = [one.status for one in report.endpoints if one.status is not None]
    findings += _cluster(
        statuses, report.members if len(statuses) == len(report.endpoints) else None
    )
    for status in statuses:
        findings += _size(status)
    findings += _compaction(report.compacted, statuses)
    findings += _rights(report.rights)
    findings += _access(report)
    if report.job is not None:
        findings += explain(report.job, report.now_unix_s, report.others)
    return findings


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of ``values`` that at least a fraction ``share`` does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _endpoint(one: EndpointReport) -> Iterator[Finding]:
    if one.status is None and "no leader" in one.error:
        yield Finding(
            "endpoint",
            "fault",
            f"{one.endpoint} has no leader, so it takes no writes",
            "see that most members of the store run and reach each other",
        )
        return
    if one.status is None:
        trouble = "refuses this client" if one.refused else "does not answer"
        why = one.error if one.refused else outage_cause(one.error)
        remedy = (
            "give --etcd-user with --etcd-password-file, or a client certificate, that the store"
            " knows"
            if one.refused
            else "see that this member of the store runs and can be reached from here, or take it"
            f" out of {named('--etcd-endpoints')}"
        )
        yield Finding("endpoint", "fault", f"{one.endpoint} {trouble}: {why}", remedy)
        return
    if is_embedded(one.status.version):
        why = "the embedded store keeps nothing across a restart: for a job that matters, use etcd"
        yield Finding("version", "note", f"{one.endpoint}: {why}")
    else:
        level, why = judge_version(one.status.version)
        cure = f"use {FLOOR}, or later; see docs/operations.md#the-stores-version"
        yield Finding("version", level, f"{one.endpoint}: {why}", "" if level == "ok" else cure)
    if one.status.learner:
        yield Finding(
            "endpoint",
            "fault",
            f"{one.endpoint} is a learner, which answers no reads",
            "take it out of --etcd-endpoints, or promote it: etcdctl member promote",
        )
    yield from (_alarm(one.endpoint, error) for error in one.status.errors)
    if one.reads_s:
        yield _latency(one.endpoint, one.reads_s)
        if one.error:
            yield Finding(
                "endpoint",
                "fault",
                f"{one.endpoint} answered, then stopped: {one.error}",
                "check that this member of the store keeps running, and the network (firewall,"
                " proxy) between it and this machine",
            )
    elif one.error:
        yield Finding(
            "latency",
            "fault",
            f"{one.endpoint} answers, but no read comes back: {one.error}",
            "see that most members of the store run and reach each other",
        )


def _alarm(endpoint: str, error: str) -> Finding:
    if "NOSPACE" in error:
        return Finding(
            "alarm",
            "fault",
            f"{endpoint}: NOSPACE, the store takes no writes until there is room",
            f"{NO_SPACE_CURE}; raise --quota-backend-bytes, or {DO_COMPACTION}",
        )
    if "CORRUPT" in error:
        return Finding(
            "alarm",
            "fault",
            f"{endpoint}: CORRUPT, the members' data differ",
            "restore the members whose data differ from the others, or all from a backup",
        )
    return Finding(
        "alarm", "fault", f"{endpoint}: {error}", "see that most members of the store run"
    )


def _latency(endpoint: str, reads_s: Sequence[float]) -> Finding:
    middle_s, slow_s = percentile(reads_s, 0.5), percentile(reads_s, 0.99)
    level: Level = "ok"
    if slow_s >= READ_WARNING_S:
        level = "fault" if slow_s >= READ_FAULT_S else "warning"
    return Finding(
        "latency",
        level,
        f"{endpoint}: {len(reads_s)} reads, p50 {_ms(middle_s)}, p99 {_ms(slow_s)}",
        ""
        if level == "ok"
        else "see to the network between here and the store, and to its disks and processors",
    )


def _cluster(
    statuses: Sequence[StoreStatus], members: Sequence[EtcdMember] | None
) -> Iterator[Finding]:
    clusters = {status.cluster_id for status in statuses}
    if len(clusters) > 1:
        yield Finding(
            "cluster",
            "fault",
            f"the endpoints belong to {len(clusters)} different stores: "
            + ", ".join(f"{status.endpoint} to {status.cluster_id:x}" for status in statuses),
            f"name members of one store alone in {named('--etcd-endpoints')}",
        )
    if members is None or not statuses:
        return
    reporting = {status.member_id for status in statuses}
    unnamed = sorted(
        member.name or f"{member.member_id:x}"
        for member in members
        if member.member_id not in reporting
    )
    if unnamed:
        yield Finding(
            "cluster",
            "warning",
            f"of the store's {len(members)} members, no endpoint reaches {', '.join(unnamed)}",
            "name every member in --etcd-endpoints, so that the loss of one is not felt",
        )
    else:
        count = "its one member was" if len(members) == 1 else f"all {len(members)} members were"
        yield Finding("cluster", "ok", f"{count} reached")


def _size(status: StoreStatus) -> Iterator[Finding]:
    quota = status.db_quota_bytes or QUOTA_DEFAULT_BYTES
    share = status.db_size_bytes / quota
    level: Level = "ok"
    if share >= SIZE_WARNING:
        level = "fault" if share >= SIZE_FAULT else "warning"
    note = "" if status.db_quota_bytes else " (etcd's default: this version does not tell its own)"
    yield Finding(
        "size",
        level,
        f"{status.endpoint}: {_mb(status.db_size_bytes)} on disk,"
        f" {_mb(status.db_size_in_use_bytes)} in use, of a quota of {_mb(quota)}{note}",
        ""
        if level == "ok"
        else "etcdctl compact, then etcdctl defrag on every member; raise"
        " --quota-backend-bytes if that is not enough",
    )


def _compaction(compacted: bool | None, statuses: Sequence[StoreStatus]) -> Iterator[Finding]:
    if compacted is None or not statuses:
        return
    if not compacted and all(is_embedded(status.version) for status in statuses):
        return
    revision = max(status.revision for status in statuses)
    if compacted:
        yield Finding(
            "compaction", "ok", f"the history was compacted; the revision is {revision} now"
        )
    elif revision > UNCOMPACTED_MAX:
        yield Finding(
            "compaction",
            "warning",
            f"none of {revision} revisions was ever compacted, so the store only grows",
            DO_COMPACTION,
        )
    else:
        yield Finding(
            "compaction",
            "note",
            f"none of {revision} revisions is compacted yet; auto-compaction cannot be checked from"
            " here",
            f"make sure it is on: {DO_COMPACTION}",
        )


def _rights(rights: RightsReport) -> Iterator[Finding]:
    if rights.failed:
        yield Finding(
            "rights",
            "fault",
            f"under the job's prefix it is not possible to {rights.failed}: {rights.error}",
            "grant the user this job's role (muster store-role prints it), or mend what is named"
            " above",
        )
    elif rights.done:
        yield Finding("rights", "ok", f"the job's prefix: {', '.join(rights.done)}")
    if rights.write_s is not None:
        level: Level = "ok"
        if rights.write_s >= WRITE_WARNING_S:
            level = "fault" if rights.write_s >= WRITE_FAULT_S else "warning"
        watched = (
            "" if rights.watch_s is None else f", shown by a watch after {_ms(rights.watch_s)}"
        )
        yield Finding(
            "latency",
            level,
            f"a write took {_ms(rights.write_s)}{watched}",
            "" if level == "ok" else "see to the disks of the store's members",
        )


def _access(report: Report) -> Iterator[Finding]:
    if report.authenticated is False and not report.local:
        yield Finding(
            "access",
            "warning",
            "authentication is off: any client that reaches the store can change every job",
            "make a user for the job (muster store-role) and run etcdctl auth enable; see"
            " docs/security.md#set-up",
        )
    elif report.authenticated:
        yield Finding("access", "ok", "authentication is on")
    if not report.encrypted and not report.local:
        yield Finding(
            "access",
            "warning",
            "the connections to the store are not encrypted",
            "give the store certificates, and https:// endpoints with --etcd-cacert here; see"
            " docs/security.md#set-up",
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _mb(size: int) -> str:
    return f"{size / 1_000_000:.1f} MB"
