# SPDX-License-Identifier: Apache-2.0
"""``muster doctor``: reports the faults of the store, each with its remedy."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from random import SystemRandom
from types import ModuleType
from typing import Any

import click

from agent.config.sidecar import JobConfig
from agent.telemetry.logs import printable
from console.counting import counted
from console.doctor.diagnosis import Finding, diagnose, percentile
from console.doctor.examine import examine
from console.doctor.report import Report
from console.help import Command
from console.options import configured_by, job_named
from console.wrapping import wrapped
from launcher_shim.exit_status import EXIT_DONE, EXIT_FAULT, EXIT_UNAVAILABLE
from rdzv.errors import ConfigError

INDENT = 21
"""Columns before a finding's sentence."""


def of_a_cluster(command: Callable[..., int]) -> Callable[..., int]:
    """Decorate the command with ``--cluster``, which needs the name of no job and no store."""

    @functools.wraps(command)
    def read(cluster: bool, kubeconfig: str | None, **arguments: Any) -> int:
        if not cluster:
            if kubeconfig is not None:
                raise ConfigError("--kubeconfig is for --cluster: give both, or neither")
            return command(**arguments)
        findings = _cluster().cluster_findings(kubeconfig)
        status = _found(findings)
        if arguments["as_json"]:
            click.echo(json.dumps({"status": status, "findings": _shown(findings)}))
        else:
            _tell(findings)
        return status

    read = click.option(
        "--kubeconfig",
        metavar="FILE",
        help="With --cluster: how to reach it.  [KUBECONFIG, or ~/.kube/config; in a pod its own]",
    )(read)
    return click.option(
        "--cluster", is_flag=True, help="Examine the chart, the webhook and labelled pods instead."
    )(read)


def _cluster() -> ModuleType:
    """Import the ``--cluster`` part late, as it needs aiohttp, an optional dependency.

    Raises ``ConfigError`` if that is not installed.
    """
    try:
        return import_module("console.doctor.cluster.command")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "aiohttp":
            raise
        raise ConfigError(
            f"muster doctor --cluster needs the package {error.name}, which is not installed: pip"
            " install 'muster-elastic[controller]'"
        ) from error


@click.command(
    cls=Command,
    statuses={1: "there is a fault", 69: "no endpoint, or no API server, answers a read"},
    short_help="What is wrong with a job and its store, and what to do.",
    epilog="\b\nExamples:\n  muster doctor --job digits\n"
    "  muster doctor --job digits --json || echo broken\n"
    "  muster doctor --cluster",
)
@of_a_cluster
@job_named
@configured_by(JobConfig)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def doctor(config: JobConfig, as_json: bool) -> int:
    """Examine a job, the store that it rests on, and its rights in it; or, with --cluster, what the
    chart has installed in a cluster of Kubernetes, and the pods with the label.

    The job can rest on it where there is no fault; warnings do not count. The rights are tried out
    on a key of its own under the job's prefix, which is deleted again.
    """
    logging.getLogger("rdzv").setLevel(logging.ERROR)  # its warnings are reported as findings
    report = asyncio.run(examine(config, SystemRandom()))
    findings = diagnose(report)
    status = _status(report, findings)
    if as_json:
        click.echo(json.dumps(_json(report, findings, status)))
    else:
        _tell(findings)
    return status


def _tell(findings: Sequence[Finding]) -> None:
    for finding in findings:
        _say(f"{finding.level:<8} {finding.check:<11} {finding.sentence}", INDENT)
        if finding.remedy:
            _say(f"{'':<{INDENT}}-> {finding.remedy}", INDENT + len("-> "))
    click.echo(_sum(findings))


def _say(line: str, indent: int) -> None:
    click.echo(wrapped(printable(line), sys.stdout, indent))


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
        "findings": _shown(findings),
    }


def _shown(findings: Sequence[Finding]) -> list[dict[str, str]]:
    return [
        {
            "check": finding.check,
            "level": finding.level,
            "sentence": finding.sentence,
            "remedy": finding.remedy,
        }
        for finding in findings
    ]
