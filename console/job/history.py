# SPDX-License-Identifier: Apache-2.0
"""``muster history``: the recorded events of a job."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from time import time

import click

from agent.job_config import JobConfig
from agent.telemetry.logs import printable
from agent.verdict.states import Level
from agent.verdict.view import moment
from console.help import Command
from console.job.reading import following, look
from console.options import configured_by, job_named, shown_with
from console.styling import coloured, on_terminal, wrapped
from rdzv.records.job import HistoryEntry, shown_round

_LEVELS: Mapping[str, Level] = {
    "failed": "fault",
    "lost": "fault",
    "quarantine": "warning",
    "pause": "note",
    "drain": "note",
    "round": "ok",
    "state": "note",
}
"""The colours of entries; any other is shown in the terminal's own."""

OMITTED = frozenset(
    {"error", "failed_starts", "in_a_row", "members", "pod_uid", "rank", "ranks", "run_id"}
    | {"saved_round", "state", "wait_s"}
)
"""Details for programs, or in the sentence, too: shown in JSON only."""

INDENT = len("2026-01-02T03:04:05Z  quarantine ")
"""Indent of the lines below the sentence."""


@click.command(
    cls=Command,
    epilog="\b\nExamples:\n  muster history digits\n  muster history digits -w",
)
@job_named
@configured_by(JobConfig)
@shown_with
def history(config: JobConfig, as_json: bool, watch: bool, interval_s: float) -> None:
    """Show what happened to a job, oldest first; the store keeps the last 200 entries."""
    text = _json if as_json else _wrapped if on_terminal(sys.stdout) else _line
    if watch:
        asyncio.run(_follow(config, text, interval_s))
        return
    view = asyncio.run(look(config))
    for entry in view.history:
        click.echo(text(entry))
    if clocks := view.clocks(time()):
        click.echo(f"{printable(clocks)}; the order is right", err=True)


async def _follow(
    config: JobConfig, text: Callable[[HistoryEntry], str], interval_s: float
) -> None:
    shown: set[tuple[int, str, str]] = set()
    async with following(config) as views:
        async for view in views:
            present = {(one.revision, one.member, one.what): one for one in view.history}
            for key, entry in present.items():
                if key not in shown:
                    click.echo(text(entry))
            sys.stdout.flush()
            shown = set(present)
            await asyncio.sleep(interval_s)


def _line(entry: HistoryEntry) -> str:
    details = ", ".join(_details(entry))
    return printable(f"{_sentence(entry)} ({details})" if details else _sentence(entry))


def _wrapped(entry: HistoryEntry) -> str:
    """Format an entry for a terminal: the sentence, with its details below it."""
    details = printable(", ".join(_details(entry)))
    lines = [printable(_sentence(entry)), *([" " * INDENT + details] if details else [])]
    text = "\n".join(wrapped(line, sys.stdout, INDENT) for line in lines)
    level = _LEVELS.get(entry.what)
    word = coloured(entry.what, level, sys.stdout) if level else entry.what
    return text.replace(f"  {entry.what} ", f"  {word} ", 1)


def _sentence(entry: HistoryEntry) -> str:
    return f"{moment(entry.at_unix_s)}  {entry.what:<10} {entry.member}: {entry.why}"


def _details(entry: HistoryEntry) -> list[str]:
    """Return the details in words: ``saved after 0.14 s``."""
    shown = {
        key: value
        for key, value in entry.details.items()
        if key not in OMITTED and value not in ("", None)
    }
    if isinstance(number := shown.get("round"), int):
        shown["round"] = shown_round(number)
    return [
        f"{key[:-2].replace('_', ' ')} {value:.3g} s"
        if key.endswith("_s") and isinstance(value, int | float)
        else f"{key.replace('_', ' ')} {value}"
        for key, value in shown.items()
    ]


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
