# SPDX-License-Identifier: Apache-2.0
"""``muster doctor``: reports the faults of a job and its store, each with its remedy."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from random import SystemRandom
from typing import Any

import click

from agent.config.job import JobConfig
from agent.telemetry.logs import printable
from agent.verdict.decision import verdict
from agent.verdict.states import STATES, Level
from console.context_file import defaults
from console.doctor.diagnosis import diagnose, percentile
from console.doctor.examine import examine
from console.doctor.finding import Finding, worst_first
from console.doctor.report import Report
from console.help import Command
from console.options import configured_by, job_named, printed
from console.style import coloured, symbol
from console.whereabouts import ClusterOptions
from console.wrapping import wrapped
from launcher_shim.exit_status import EXIT_DONE, EXIT_FAULT, EXIT_UNAVAILABLE
from rdzv.sentences import counted


def of_a_cluster(command: Callable[..., int]) -> Callable[..., int]:
    """Decorate the command with ``--cluster``, which needs the name of no job and no store."""

    @functools.wraps(command)
    def read(cluster: bool, **arguments: Any) -> int:
        if not cluster:
            return command(**arguments)
        from console.doctor.cluster.command import cluster_findings  # needs an extra

        options = ClusterOptions(arguments["kubeconfig"], arguments["context"])
        options = options.completed(defaults(os.environ), os.environ)
        findings = cluster_findings(options.kubeconfig, options.context)
        status = _found(findings)
        if arguments["as_json"] or arguments["form"] == "json":
            click.echo(json.dumps({"status": status, "findings": _shown(findings)}))
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
