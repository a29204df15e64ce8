# SPDX-License-Identifier: Apache-2.0
"""``muster doctor``: examines a job and its store, and reports each fault with its remedy.

Each endpoint of the store is asked by itself, and one job's rights are tried.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from random import Random, SystemRandom
from time import monotonic, time
from typing import Any, TypeVar

import click

from agent.job_config import JobConfig
from agent.telemetry.logs import printable
from agent.verdict.decision import verdict
from agent.verdict.states import STATES, Level
from console.doctor.diagnosis import (
    READ_FAULT_S,
    EndpointReport,
    EtcdMember,
    Report,
    RightsReport,
    diagnose,
    percentile,
)
from console.doctor.job import Finding, worst_first
from console.help import Command
from console.job.reading import jobs_in, read_view
from console.options import configured_by, job_named, printed
from console.styling import coloured, symbol, wrapped
from console.whereabouts import ClusterOptions, defaults_of_file
from launcher_shim.exit_status import EXIT_DONE, EXIT_FAULT, EXIT_UNAVAILABLE
from rdzv.errors import StoreError, StoreRefused
from rdzv.keys import JobKeys
from rdzv.sentences import counted
from rdzv.store import Compare, Delete, Put, Store
from rdzv.store.access import Access
from rdzv.store.etcd.admin import auth_enabled, cluster_members, history_compacted
from rdzv.store.etcd.client import open_store

T = TypeVar("T")

CALL_TIMEOUT_S = 3.0
READS = 50
READS_TIMEOUT_S = 3.0
PROBE_LEASE_S = 10
"""TTL of the probe's lease: it removes the probe's key if this process dies before it does."""


async def examine(config: JobConfig, random: Random) -> Report:
    """Measure everything; endpoints that do not answer cost ``CALL_TIMEOUT_S`` in all."""
    access, keys = config.access, JobKeys(config.namespace, config.job)
    endpoints = await asyncio.gather(
        *(endpoint_report(replace(access, endpoints=(one,)), keys) for one in access.endpoints)
    )
    reached = tuple(one.endpoint for one in endpoints if one.reached)
    report = Report(
        endpoints=tuple(endpoints),
        rights=RightsReport(),
        encrypted=access.tls,
        local=all(_is_loopback(target) for target in access.targets),
    )
    if not reached:
        return report
    # The report has the endpoints that do not answer: they must not slow down the other checks.
    access = replace(access, endpoints=reached)
    store = open_store(access)
    try:
        rights = await _rights(store, keys.probe(f"{random.getrandbits(48):012x}"), random)
        view = await _unless_refused(lambda: read_view(store, keys, timeout_s=CALL_TIMEOUT_S))
        others = None
        if view is not None and view.job is None:
            others = await _unless_refused(lambda: jobs_in(store, timeout_s=CALL_TIMEOUT_S))
        return replace(
            report,
            rights=rights,
            job=view,
            others=tuple(others or ()),
            members=await _unless_refused(lambda: _members(access)),
            authenticated=await _unless_refused(
                lambda: auth_enabled(access, timeout_s=CALL_TIMEOUT_S)
            ),
            compacted=await _unless_refused(
                lambda: history_compacted(access, keys, timeout_s=CALL_TIMEOUT_S)
            ),
            now_unix_s=time(),
        )
    finally:
        await store.close()


async def endpoint_report(access: Access, keys: JobKeys) -> EndpointReport:
    """Read one endpoint's status, and time up to ``READS`` reads within ``READS_TIMEOUT_S``."""
    (endpoint,) = access.endpoints
    store = open_store(access)
    report = EndpointReport(endpoint)
    reads_s: list[float] = []
    try:
        report = replace(report, status=await store.status(timeout_s=CALL_TIMEOUT_S))
        began_s = monotonic()
        async with asyncio.timeout(READS_TIMEOUT_S):
            while len(reads_s) < READS:
                began_s = monotonic()
                await store.range(keys.job, timeout_s=CALL_TIMEOUT_S)
                reads_s.append(monotonic() - began_s)
    except StoreRefused as error:
        # Whether this user is known and may read is checked with the rights.
        refused = report.status is None
        report = replace(report, error=str(error) if refused else "", refused=refused)
    except StoreError as error:
        report = replace(report, error=str(error))
        if reads_s:
            reads_s.append(monotonic() - began_s)
    except TimeoutError:
        waited_s = monotonic() - began_s
        if not reads_s:
            report = replace(report, error=f"no answer within {READS_TIMEOUT_S:g} s")
        elif waited_s >= READ_FAULT_S:
            report = replace(report, error=f"no answer in {waited_s:.1f} s")
            reads_s.append(waited_s)
    finally:
        await store.close()
    return replace(report, reads_s=tuple(reads_s))


async def _rights(store: Store, key: str, random: Random) -> RightsReport:
    """Do with a key of our own what a sidecar does with its job's keys, then delete it."""
    lease_id = random.getrandbits(62) + 1
    report = RightsReport()
    step = "read"
    try:
        read = await store.range(key)
        report, step = replace(report, done=(*report.done, step)), "grant a lease"
        await store.lease_grant(lease_id, PROBE_LEASE_S)
        report, step = replace(report, done=(*report.done, step)), "write"
        began_s = monotonic()
        written = await store.txn([Compare(key, "create", "=", 0)], [Put(key, b"doctor", lease_id)])
        report = replace(report, done=(*report.done, step), write_s=monotonic() - began_s)
        step = "watch"
        await _see(store, key, read.revision + 1, written.revision)
        report = replace(report, done=(*report.done, step), watch_s=monotonic() - began_s)
        step = "renew a lease"
        await store.lease_keep_alive(lease_id)
        report, step = replace(report, done=(*report.done, step)), "delete"
        await store.txn([Compare(key, "mod", "=", written.revision)], [Delete(key)])
        return replace(report, done=(*report.done, step))
    except (StoreError, TimeoutError) as error:
        return replace(report, failed=step, error=str(error) or "nothing came in time")
    finally:
        if "grant a lease" in report.done:
            await _unless_refused(lambda: store.lease_revoke(lease_id))


async def _see(store: Store, key: str, since: int, revision: int) -> None:
    async with asyncio.timeout(CALL_TIMEOUT_S), aclosing(store.watch(key, since)) as batches:
        async for batch in batches:
            if batch.revision >= revision:
                return


async def _members(access: Access) -> tuple[EtcdMember, ...]:
    members = await cluster_members(access, timeout_s=CALL_TIMEOUT_S)
    return tuple(EtcdMember(member_id, name) for member_id, name in members)


async def _unless_refused(ask: Callable[[], Awaitable[T]]) -> T | None:
    """Await an answer that not every user or server gives; None if it fails or times out."""
    try:
        return await ask()
    except (StoreError, TimeoutError):
        return None


def _is_loopback(target: str) -> bool:
    host = target.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def of_a_cluster(command: Callable[..., int]) -> Callable[..., int]:
    """Decorate the command with ``--cluster``, which needs the name of no job and no store."""

    @functools.wraps(command)
    def read(cluster: bool, **arguments: Any) -> int:
        if not cluster:
            return command(**arguments)
        from console.doctor.in_cluster import cluster_findings  # needs an extra

        options = ClusterOptions(arguments["kubeconfig"], arguments["context"])
        options = options.completed(defaults_of_file(os.environ), os.environ)
        findings = cluster_findings(options.kubeconfig, options.context)
        status = _found(findings)
        if arguments["as_json"] or arguments["form"] == "json":
            click.echo(json.dumps({"status": status, "findings": list(map(asdict, findings))}))
        else:
            _tell(findings, every=arguments["every"])
        return status

    return click.option(
        "--cluster", is_flag=True, help="Examine the chart, the webhook and labelled pods instead."
    )(read)


@click.command(
    cls=Command,
    statuses={1: "there is a fault", 69: "no endpoint, or no API server, answers a read"},
    epilog="\b\nExamples:\n  muster doctor digits\n  muster why digits\n"
    "  muster doctor digits --json || echo broken\n"
    "  muster doctor --cluster",
)
@of_a_cluster
@job_named
@configured_by(JobConfig)
@functools.partial(printed, says="One JSON object.")
@click.option("--all", "every", is_flag=True, help="Print what is in order, too, line by line.")
def doctor(config: JobConfig, as_json: bool, every: bool) -> int:
    """Say why a job stands still or may lose work, and the one thing to do first.

    It examines the store, then the job, in the order of docs/stuck.md. With --cluster it examines
    what the chart has installed in Kubernetes, and the pods with the label.

    It exits with 0 unless there is a fault; warnings do not count. It tests the rights on a key of
    its own under the job's prefix, and deletes that key.
    """
    logging.getLogger("rdzv").setLevel(logging.ERROR)  # its warnings are reported as findings
    report = asyncio.run(examine(config, SystemRandom()))
    findings = diagnose(report)
    status = _status(report, findings)
    if as_json:
        click.echo(json.dumps(_json(report, findings, status)))
    else:
        doing = ""
        if report.job is not None:
            found = verdict(report.job, report.now_unix_s)
            if STATES[found.state].level == "ok":  # else it is among the findings
                doing, *_ = found.lines(report.job.name, report.now_unix_s)
        _tell(findings, every=every, doing=doing)
    return status


def _tell(findings: Sequence[Finding], *, every: bool, doing: str = "") -> None:
    """Print the findings, faults first; what is in order in one line, unless ``every`` is set.

    ``doing``: what a job does that is getting on.
    """
    for finding in worst_first(findings):
        if finding.level == "ok" and not every:
            continue
        _say(finding.level, finding.check, finding.sentence, finding.remedy)
    well = {finding.check: None for finding in findings if finding.level == "ok"}
    if well and not every:
        _say("ok", "in order", ", ".join(well))
    click.echo(": ".join(filter(None, (_sum(findings), printable(doing)))))
    if (first := the_one_thing(findings)) is not None:
        line = f"do first: {printable(first)}"
        click.echo(coloured(wrapped(line, sys.stdout, len("do first: ")), "note", sys.stdout))


def _say(level: Level, check: str, sentence: str, remedy: str = "") -> None:
    """Print one finding, with the sign of its level before it and its remedy below it."""
    sign = symbol(level, sys.stdout)
    width = len(click.unstyle(sign))  # colours have none
    column = f"{'':<{width}} {check:<11} "
    line = wrapped(printable(column + sentence), sys.stdout, len(column))
    click.echo(sign + line[width:])
    if remedy:
        line = f"{'':<{len(column)}}-> {printable(remedy)}"
        click.echo(wrapped(line, sys.stdout, len(column) + len("-> ")))


def the_one_thing(findings: Sequence[Finding]) -> str | None:
    """Return the remedy to begin with; None if there is nothing to do.

    Faults come before warnings, the store before the job; of notes only the state of the job asks
    for something.
    """
    by_state = {state.check for state in STATES.values()}
    for finding in worst_first(findings):
        if finding.remedy and (finding.level != "note" or finding.check in by_state):
            return finding.remedy
    return None


def _status(report: Report, findings: Sequence[Finding]) -> int:
    if all(one.away for one in report.endpoints):
        return EXIT_UNAVAILABLE
    return _found(findings)


def _found(findings: Sequence[Finding]) -> int:
    return EXIT_FAULT if any(finding.level == "fault" for finding in findings) else EXIT_DONE


def _sum(findings: Sequence[Finding]) -> str:
    counts = [
        counted(count, level)
        for level in ("fault", "warning")
        if (count := sum(finding.level == level for finding in findings))
    ]
    return ", ".join(counts) or "nothing is wrong"


def _json(report: Report, findings: Sequence[Finding], status: int) -> object:
    return {
        "status": status,
        "endpoints": [
            {
                "endpoint": one.endpoint,
                "reached": one.reached,
                "error": one.error,
                "version": one.status.version if one.status else None,
                "member_id": f"{one.status.member_id:x}" if one.status else None,
                "cluster_id": f"{one.status.cluster_id:x}" if one.status else None,
                "db_size_bytes": one.status.db_size_bytes if one.status else None,
                "db_size_in_use_bytes": one.status.db_size_in_use_bytes if one.status else None,
                "db_quota_bytes": one.status.db_quota_bytes if one.status else None,
                "read_p50_s": percentile(one.reads_s, 0.5) if one.reads_s else None,
                "read_p99_s": percentile(one.reads_s, 0.99) if one.reads_s else None,
            }
            for one in report.endpoints
        ],
        "authenticated": report.authenticated,
        "encrypted": report.encrypted,
        "write_s": report.rights.write_s,
        "watch_s": report.rights.watch_s,
        "verdict": None
        if (job := report.job) is None or job.job is None
        else verdict(job, report.now_unix_s).as_json(),
        "do_first": the_one_thing(findings),
        "findings": list(map(asdict, findings)),
    }
