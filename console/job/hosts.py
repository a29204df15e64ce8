# SPDX-License-Identifier: Apache-2.0
"""``muster hosts``: the hosts that launchers may use now."""

from __future__ import annotations

import click

from agent.config.job import JobConfig
from agent.verdict.view import JobView
from console.help import Command
from console.job.output import Face, Grid, show
from console.options import configured_by, job_named, shown_with


@click.command(
    cls=Command,
    epilog="\b\nExamples:\n  muster hosts digits\n  muster hosts digits -w -o json",
)
@job_named
@configured_by(JobConfig)
@shown_with
def hosts(config: JobConfig, as_json: bool, watch: bool, interval_s: float) -> None:
    """Show the hosts of a job, oldest first: those that are listed now.

    A sidecar's own list may keep a host for a few seconds after it was lost.
    """
    face = Face(_grids, _line, _json)
    show(config, face, as_json=as_json, watch=watch, interval_s=interval_s)


def _grids(view: JobView) -> list[Grid]:
    rows = tuple(
        (host.token, str(host.slots), member.name, member.address, member.node)
        for host, member in view.hosts()
    )
    return [Grid(view.listing.reason, ("HOST", "SLOTS", "MEMBER", "ADDRESS", "NODE"), rows)]


def _line(view: JobView) -> str:
    return " ".join(f"{host.token}:{host.slots}" for host, _ in view.hosts()) or "(no host)"


def _json(view: JobView) -> object:
    return {
        "hosts": [
            {
                "host": host.token,
                "slots": host.slots,
                "member": member.name,
                "address": member.address,
                "node": member.node,
            }
            for host, member in view.hosts()
        ],
    }
