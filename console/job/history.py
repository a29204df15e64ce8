# SPDX-License-Identifier: Apache-2.0
"""``muster history``: what happened to a job."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime

import click

from agent.config.sidecar import JobConfig
from agent.telemetry.logs import printable
from console.help import Command
from console.job.reading import following, look
from console.options import configured_by, job_named, shown_with
from rdzv.records.history import HistoryEntry

UNTOLD = frozenset({"pod_uid"})
"""For machines: in JSON alone."""


@click.command(
    cls=Command,
    short_help="What happened to a job: joins, leaves, losses, drains, rounds.",
    epilog="\b\nExamples:\n  muster history --job digits\n  muster history --job digits --watch",
)
@job_named
@configured_by(JobConfig)
@shown_with
def history(config: JobConfig, as_json: bool, watch: bool) -> None:
    """Show what happened to a job, oldest first; the store keeps the last 200 entries."""
    text = _json if as_json else _line
    if watch:
        asyncio.run(_follow(config, as_json))
        return
    for entry in asyncio.run(look(config)).history:
        click.echo(text(entry))


async def _follow(config: JobConfig, as_json: bool) -> None:
    text = _json if as_json else _line
    shown: set[tuple[int, str]] = set()
    async with following(config) as views:
        async for view in views:
            present = {(entry.revision, entry.member): entry for entry in view.history}
            for key, entry in present.items():
                if key not in shown:
                    click.echo(text(entry))
            sys.stdout.flush()
            shown = set(present)


def _line(entry: HistoryEntry) -> str:
    moment = datetime.fromtimestamp(entry.at_unix_s, UTC).isoformat(timespec="seconds")
    told = {key: value for key, value in entry.details.items() if key not in UNTOLD}
    details = "".join(f" {key}={value}" for key, value in told.items() if value not in ("", None))
    sentence = f"{entry.what:<10} {entry.member}: {entry.why}{details}"
    return printable(f"{moment.replace('+00:00', 'Z')}  {sentence}")


def _json(entry: HistoryEntry) -> str:
    return json.dumps(
        {
            "revision": entry.revision,
            "at_unix_s": entry.at_unix_s,
            "what": entry.what,
            "member": entry.member,
            "why": entry.why,
            "details": entry.details,
        }
    )
