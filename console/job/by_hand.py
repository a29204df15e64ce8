# SPDX-License-Identifier: Apache-2.0
"""``muster set``, ``muster admit``, ``muster forget``: values of a job that an operator changes.

Its bounds while it trains, a member's quarantine, and the saves that its next start needs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from time import time
from typing import Any

import click

from agent.job_config import JobConfig
from agent.verdict.view import JobView, present_view
from console.help import Command
from console.job.changing import (
    change,
    check_versions,
    no_member,
    present_job,
    requester,
    write,
)
from console.job.reading import connected
from console.options import configured_by, job_named, pod_names, printed, read_option
from rdzv.errors import ConfigError, MembershipError
from rdzv.job import JobClient
from rdzv.keys import JobKeys
from rdzv.records.job import HistoryEntry, Job, change_between, entry_operations
from rdzv.records.policy import NODES, JobPolicy
from rdzv.settings import settings_of
from rdzv.snapshot import Snapshot, listing_of
from rdzv.store import Compare, Delete, GuardedWrites, Operation, Put

LIMITS = settings_of(JobPolicy, "change")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The values given on the command line: the policy's by name; ``desired`` is 0 for ``none``."""

    policy: Mapping[str, Any]
    desired: int | None = None

    def of(self, job: Job) -> Job:
        """Return the job with these values; raises ``ConfigError`` if they are not valid for it."""
        if self.policy.get("sizes") and self.policy.get("unit", 1) > 1:
            raise ConfigError("--sizes and --unit are both given: give --sizes alone")
        wanted = job.desired if self.desired is None else self.desired or None
        after = replace(job, policy=job.policy.changed(self.policy), desired=wanted)
        if fault := _fault(after):
            raise ConfigError(f"the job stays as it is: {fault}")
        return after


def _fault(job: Job) -> str:
    if fault := job.policy.fault:
        return fault
    least, most, desired = job.policy.min_nodes, job.policy.max_nodes, job.desired
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
    short = after.policy.smallest - len(changed.listed)
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


def _limit_flags() -> list[str]:
    """Return the flags of all limits; ``desired`` follows the bounds that it lies within."""
    flags = [setting.flag for setting in LIMITS.values()]
    return [*flags[:2], "--desired", *flags[2:]]


def _limits(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with an option for each limit of a job."""
    named = {setting.flag: (name, setting) for name, setting in LIMITS.items()}
    for flag in reversed(_limit_flags()):
        if flag in named:
            name, setting = named[flag]
            option = click.option(flag, name, metavar=setting.metavar, help=setting.why)
        else:
            option = click.option(flag, metavar="N|none", help="Nodes that a new world waits for.")
        command = option(command)
    return command


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
@_limits
@partial(printed, says="One JSON object.")
def set_values(
    config: JobConfig,
    as_json: bool,
    desired: str | None,
    **texts: str | None,
) -> int:
    """Change the limits of JOB while it trains; omitted limits stay as they are.

    Pods that no longer fit save with all others, and stand by. The new values hold until pods start
    with others: the newest template wins.
    """
    given = {
        name: read_option(LIMITS[name].flag, LIMITS[name].parse, text)
        for name, text in texts.items()
        if text is not None
    }
    wanted = Wanted(
        given, None if desired is None else read_option("--desired", _nodes_or_none, desired)
    )
    if wanted == Wanted({}):
        raise ConfigError(f"nothing to set: give {', '.join(_limit_flags())}")
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
            who = requester()
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
        "before": before.values,
        "now": after.values,
        "follows": follows,
    }


def _nodes_or_none(text: str) -> int:
    return 0 if text == "none" else NODES(text)


@click.command(
    cls=Command,
    epilog="\b\nExample:\n  muster admit trainer-3 --job digits",
)
@configured_by(JobConfig)
@click.argument("member", shell_complete=pod_names)
def admit(config: JobConfig, member: str) -> int:
    """End the quarantine of MEMBER: it may join the next world, and its failures are forgotten.

    muster status names the quarantined pods, and when the quarantine ends by itself.
    """
    asyncio.run(_admit(config, member))
    click.echo(f"{member} may take part again")
    return 0


async def _admit(config: JobConfig, name: str) -> None:
    def check(snapshot: Snapshot) -> None:
        member = snapshot.members.get(name)
        if member is None:
            raise no_member(config.job, name, snapshot)
        if snapshot.quarantine_of(member) is None:
            raise MembershipError(f"{name} is not quarantined: nothing to admit, see muster status")

    def plan(client: JobClient, snapshot: Snapshot) -> GuardedWrites | None:
        record = snapshot.quarantines.get(name)
        if snapshot.job is None or record is None or not record.out:
            return None
        key = client.keys.in_generation(snapshot.job.generation).quarantine(name)
        details: dict[str, object] = {"deaths": record.deaths, "pod_uid": record.pod_uid}
        entry = HistoryEntry("admit", name, f"let in by hand by {requester()}", time(), details)
        here = Compare(key, "mod", "=", record.mod_revision)
        return [here], [Delete(key), *client.history(entry)]

    await change(config, check, plan)


@click.command(
    cls=Command,
    epilog="Example: muster forget digits",
)
@job_named
@configured_by(JobConfig)
def forget(config: JobConfig) -> int:
    """Forget the last step that all ranks have saved, to train from scratch.

    The next start then does not insist on that step. Checkpoints stay: delete them yourself, or the
    script loads them. A world that trains is not disturbed, and its next save counts.
    """
    click.echo(asyncio.run(_forget(config)))
    return 0


async def _forget(config: JobConfig) -> str:
    """Forget the last commit; return a sentence about the result."""

    def plan(client: JobClient, snapshot: Snapshot) -> GuardedWrites | None:
        present = [kv.key for kv in client.mirror.under(client.keys.history)]
        return forgetting(client.keys, snapshot, requester(), time(), present)

    before = await change(config, lambda snapshot: None, plan)
    lost = JobKeys(config.namespace, config.job).last_commit in before.corrupt
    if before.commit_to_start_from is None and not lost:
        return f"job {config.job} has no last commit: there is nothing to forget"
    last = before.last_commit
    subject = "a last commit that could not be read" if last is None else f"step {last.step}"
    return (
        f"forgotten: {subject}; the next start of job {config.job} goes on from whatever its"
        " checkpoint directory has, or trains from scratch"
    )


def forgetting(
    keys: JobKeys, snapshot: Snapshot, author: str, at_unix_s: float, present: list[str]
) -> GuardedWrites | None:
    """Return the transaction that forgets the last commit; None if there is nothing to forget.

    A readable record stays, marked, because later commits need epochs above its own. ``present``:
    the history keys that are known to exist.
    """
    last = snapshot.commit_to_start_from
    if last is not None:
        operation: Operation = Put(keys.last_commit, replace(last, forgotten=True).to_json())
        compares = [Compare(keys.last_commit, "mod", "=", last.mod_revision)]
        why = f"the last commit, step {last.step}, is forgotten"
    elif keys.last_commit in snapshot.corrupt:
        operation = Delete(keys.last_commit)
        compares = [Compare(keys.last_commit, "mod", "<", snapshot.revision + 1)]
        why = "the last commit, which could not be read, is forgotten"
    else:
        return None
    entry = HistoryEntry("forget", author, why, at_unix_s)
    return compares, [operation, *entry_operations(keys, entry, snapshot.revision, present)]
