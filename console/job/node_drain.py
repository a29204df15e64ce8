# SPDX-License-Identifier: Apache-2.0
"""The drain of all members on one node, of one job or of all of a namespace, by the store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import click

from agent.config.job import JobConfig, StoreConfig
from agent.config.table import settings_of
from agent.telemetry.logs import printable
from console.job.drain import STATUS, DrainByHand, write
from console.job.reading import connected, look_at_all
from launcher_shim.exit_status import EXIT_DONE, EXIT_UNAVAILABLE
from rdzv.drain.transactions import TOGETHER_MOST
from rdzv.errors import MusterError
from rdzv.records.job import Member
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, GuardedWrites, Operation

FROM_BAD_TO_WORSE = ("committed", "uncommitted", "cancelled", "expired", "lost")
"""The outcomes of drains; any other end, as that of a job that cannot be asked, is worse."""


@dataclass(frozen=True, slots=True)
class NodeDrain:
    """A request to drain all that a node has. ``wait``: until the drains are over."""

    node: str
    reason: str
    deadline_s: float
    wait: bool = False
    as_json: bool = False


def on_node(snapshot: Snapshot, node: str) -> list[Member]:
    """Return the members on a node, by name."""
    members = sorted(snapshot.members.values(), key=lambda one: one.name)
    return [one for one in members if one.node == node]


def worst(statuses: Iterable[int]) -> int:
    """Return the exit status of the worst end; that of success if there is none."""
    order = [STATUS[outcome] for outcome in FROM_BAD_TO_WORSE]
    return max(
        statuses,
        key=lambda one: order.index(one) if one in order else len(order),
        default=EXIT_DONE,
    )


def who_leaves(job: str, names: Iterable[str], node: str, count: int) -> str:
    """Say which of a job's ``count`` pods leave a node."""
    names = list(names)
    verb = "leaves" if len(names) == 1 else "leave"
    return f"job {job}: {', '.join(names)} {verb} node {node}; {count - len(names)} of {count} stay"


def nothing_on(node: str, whose: str, others: Iterable[str]) -> str:
    """Say that a node has nothing to drain, and which nodes do."""
    nodes = ", ".join(sorted({one for one in others if one}))
    elsewhere = f": they are on {nodes}" if nodes else ""
    return f"nothing to drain: {whose} has no pod on node {node}{elsewhere}"


async def drain_node(config: StoreConfig, asked: NodeDrain) -> int:
    """Drain the members on the node, of the job or of each job of the namespace.

    Returns the worst exit status. Raises ``StoreError`` and others as ``connected`` does.
    """
    if isinstance(config, JobConfig):
        return await _drain(config, asked)
    views = await look_at_all(config, config.namespace)
    access = {name: getattr(config, name) for name in settings_of(StoreConfig)}
    found = [view.name for view in views if on_node(view.snapshot, asked.node)]
    if not found:
        others = (node for view in views for node in view.nodes.values())
        said = nothing_on(asked.node, f"namespace {config.namespace}", others)
        click.echo(said, err=asked.as_json)
    jobs = [JobConfig(**access, job=name) for name in found]
    return worst(await asyncio.gather(*(_drain_one_of_many(job, asked) for job in jobs)))


async def _drain_one_of_many(config: JobConfig, asked: NodeDrain) -> int:
    """Drain those of one job; an error ends no other job's drain."""
    try:
        return await _drain(config, asked)
    except MusterError as error:
        click.echo(f"muster: job {config.job}: {error}", err=True)
        return EXIT_UNAVAILABLE


async def _drain(config: JobConfig, asked: NodeDrain) -> int:
    """Start the drains of those of one job together, so that one save is for all; follow them."""
    async with connected(config) as client:
        membership = client.membership
        before = membership.snapshot()
        leave = [one.name for one in on_node(before, asked.node)]
        if not leave:
            others = (one.node for one in before.members.values())
            said = nothing_on(asked.node, f"job {config.job}", others)
            click.echo(said, err=asked.as_json)
            return EXIT_DONE
        if not asked.as_json:
            click.echo(who_leaves(config.job, leave, asked.node, len(before.members)))
        report = partial(show, config.job, as_json=asked.as_json)
        uids: dict[str, str] = {}

        def by_hand(name: str) -> DrainByHand:
            return DrainByHand(config, name, asked.reason, report)

        def plan(snapshot: Snapshot) -> GuardedWrites | None:
            compares: list[Compare] = []
            operations: list[Operation] = []
            uids.clear()
            for member in on_node(snapshot, asked.node):
                uids[member.name] = member.pod_uid
                planned = by_hand(member.name).planned(snapshot, deadline_s=asked.deadline_s)
                if planned is not None and len(operations) < TOGETHER_MOST:
                    compares += planned[0]
                    operations += planned[1]
            return (compares, operations) if operations else None

        while plan(membership.snapshot()) is not None:
            await write(client, plan)
        followed = (
            by_hand(name).follow(client, uid, to_the_end=asked.wait) for name, uid in uids.items()
        )
        return worst(await asyncio.gather(*followed))


def show(
    job: str, member: str, phase: str, sentence: str, outcome: str, *, as_json: bool = False
) -> None:
    """Print a phase of one of several drains."""
    if as_json:
        fields = {"job": job, "member": member, "phase": phase}
        click.echo(json.dumps({**fields, "sentence": sentence, "outcome": outcome}))
    else:
        click.echo(printable(f"{member}  {phase:<10} {sentence}"))
