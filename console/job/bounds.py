# SPDX-License-Identifier: Apache-2.0
"""``muster set``: changes the bounds of a job while it trains."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import time
from typing import Any

import click

from agent.config.job import JobConfig
from agent.config.parsers import count, duration_s, sizes
from agent.verdict.view import JobView, present_view
from console.help import Command
from console.job.changing import check_versions, present_job
from console.job.drain import requester, write
from console.job.reading import connected
from console.options import configured_by, job_named, printed
from rdzv.errors import ConfigError
from rdzv.records.history import HistoryEntry
from rdzv.records.job import Job, change_between
from rdzv.snapshot import Snapshot, listing_of
from rdzv.store import Compare, GuardedWrites, Put

NODES_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Wanted:
    """The values given on the command line, None if not given; ``desired`` is 0 for ``none``."""

    least: int | None = None
    most: int | None = None
    desired: int | None = None
    sizes: tuple[int, ...] | None = None
    unit: int | None = None
    gather_s: float | None = None

    def of(self, job: Job) -> Job:
        """Return the job with these values; raises ``ConfigError`` if they are not valid for it."""
        if self.sizes and self.unit is not None and self.unit > 1:
            raise ConfigError("--sizes and --unit are both given: give --sizes alone")
        # Sizes replace a unit, and a unit replaces sizes.
        chosen = job.allowed_sizes if self.sizes is None else self.sizes
        unit = job.unit if self.unit is None else self.unit
        if self.sizes:
            unit = 1
        elif self.unit is not None and self.unit > 1:
            chosen = ()
        after = replace(
            job,
            min_workers=job.min_workers if self.least is None else self.least,
            max_workers=job.max_workers if self.most is None else self.most,
            desired=job.desired if self.desired is None else self.desired or None,
            allowed_sizes=chosen,
            unit=unit,
            gather_s=job.gather_s if self.gather_s is None else self.gather_s,
        )
        if fault := _fault(after):
            raise ConfigError(f"the job stays as it is: {fault}")
        return after


def _fault(job: Job) -> str:
    if fault := job.sizes.fault:
        return fault
    least, most, desired = job.min_workers, job.max_workers, job.desired
    if desired is not None and not least <= desired <= most:
        return (
            f"desired is {desired}, not between min {least} and max {most}: give --desired another"
            " number, or none"
        )
    return ""


def consequence(view: JobView, after: Job) -> str:
    """Describe what changes for the members once the job is ``after``; empty if nothing does."""
    before = view.listing
    changed = listing_of(replace(view.snapshot, job=after), view.places)
    there = len(before.listed) + len(before.standby)
    gone = len({*before.listed} & {*changed.standby})
    come = len({*before.standby} & {*changed.listed})
    short = after.sizes.smallest - len(changed.listed)
    trains = any(run.state == "training" for run in view.runs)
    sentences = []
    if gone:
        sentences.append(
            f"{gone} of {there} members will stand by"
            + (": they save with all others and leave the world" if trains else "")
        )
    if come:
        sentences.append(f"{come} of {there} members no longer stand by, and may join")
    if short > 0:
        sentences.append(f"{short} more members are needed before a new world forms")
    return "; ".join(sentences)


@click.command(
    "set",
    cls=Command,
    epilog="""\b
Examples:
  muster set digits --max 8
  muster set digits --min 2 --max 8 --sizes 2,4,8
  muster set digits --desired none
""",
)
@job_named
@configured_by(JobConfig)
@click.option("--min", "least", metavar="N", help="Smallest world.")
@click.option("--max", "most", metavar="N", help="Largest world; extra pods stand by.")
@click.option("--desired", metavar="N|none", help="Nodes that a new world waits for.")
@click.option("--sizes", "chosen", metavar="N,…|any", help="World sizes that are allowed.")
@click.option("--unit", metavar="N", help="World size must be a multiple of N.")
@click.option(
    "--gather", metavar="TIME", help="Collect newcomers this long, and admit them together."
)
@partial(printed, says="One JSON object.")
def set_values(
    config: JobConfig,
    least: str | None,
    most: str | None,
    desired: str | None,
    chosen: str | None,
    unit: str | None,
    gather: str | None,
    as_json: bool,
) -> int:
    """Change the limits of JOB while it trains; omitted limits stay as they are.

    Pods that no longer fit save with all others, and stand by. The new values hold until pods start
    with others: the newest template wins.
    """
    nodes = count(1, NODES_MAX)
    wanted = Wanted(
        _read("--min", nodes, least),
        _read("--max", nodes, most),
        _read("--desired", _nodes_or_none, desired),
        _read("--sizes", sizes, chosen),
        _read("--unit", nodes, unit),
        _read("--gather", duration_s(0, 86_400), gather),
    )
    if wanted == Wanted():
        raise ConfigError("nothing to set: give --min, --max, --desired, --sizes, --unit, --gather")
    before, after, follows = asyncio.run(_set(config, wanted))
    if as_json:
        click.echo(json.dumps(_json(config.job, before, after, follows)))
        return 0
    change = change_between(before, after)
    click.echo(f"job {config.job}: {change or 'it has these values already, nothing changes'}")
    if follows:
        click.echo(follows)
    return 0


async def _set(config: JobConfig, wanted: Wanted) -> tuple[Job, Job, str]:
    """Write the values; return the job before and after, and the consequence for members."""
    done: tuple[Job, Job, str] | None = None
    async with connected(config) as client:

        def plan(snapshot: Snapshot) -> GuardedWrites | None:
            nonlocal done
            before = present_job(config, client, snapshot)
            after = wanted.of(before)
            if after == before:
                done = done or (before, after, "")
                return None
            check_versions(config.job, snapshot)
            done = before, after, consequence(present_view(client), after)
            who = requester(socket.gethostname())
            entry = HistoryEntry("set", who, change_between(before, after), time())
            here = Compare(client.keys.job, "mod", "=", before.mod_revision)
            return [here], [Put(client.keys.job, after.to_json()), *client.history(entry)]

        await write(client, plan)
    assert done is not None
    return done


def _json(name: str, before: Job, after: Job, follows: str) -> dict[str, object]:
    return {
        "job": name,
        "changed": bool(change_between(before, after)),
        "before": _values(before),
        "now": _values(after),
        "follows": follows,
    }


def _values(job: Job) -> dict[str, object]:
    return {
        "min": job.min_workers,
        "max": job.max_workers,
        "desired": job.desired,
        "sizes": list(job.allowed_sizes),
        "unit": job.unit,
        "gather_s": job.gather_s,
    }


def _nodes_or_none(text: str) -> int:
    return 0 if text == "none" else count(1, NODES_MAX)(text)


def _read(flag: str, parse: Callable[[str], Any], text: str | None) -> Any:
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {text!r} is wrong: {error}") from error
