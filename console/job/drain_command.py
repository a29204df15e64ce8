# SPDX-License-Identifier: Apache-2.0
"""``muster drain``: a notice by hand, for one pod or for all on a node, of one job or of all."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import click

from agent.job_config import JobConfig, StoreConfig
from agent.telemetry.logs import printable
from console.help import Command
from console.job.changing import write
from console.job.drain import STATUS, DrainByHand
from console.job.reading import connected, look_at_all
from console.options import configured_by, pod_names, printed, read_option
from launcher_shim.exit_status import EXIT_DONE, EXIT_UNAVAILABLE
from rdzv.drain.transactions import TOGETHER_MOST
from rdzv.errors import MusterError
from rdzv.records.job import Member
from rdzv.settings import duration_s, free_text, settings_of
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, GuardedWrites, Operation

FROM_BAD_TO_WORSE = ("committed", "uncommitted", "cancelled", "expired", "lost")
"""The outcomes of drains; any other end, as that of a job that cannot be asked, is worse."""

IN_THE_CLUSTER = "console.remote.node_drain:in_the_cluster"
"""The function that runs the command in a cluster."""


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

        while await write(client, plan):
            pass
        followed = (
            by_hand(name).follow(client, uid, to_the_end=asked.wait) for name, uid in uids.items()
        )
        return worst(await asyncio.gather(*followed))


def show(
    job: str, member: str, phase: str, sentence: str, outcome: str, *, as_json: bool = False
) -> None:
    """Print a phase of a drain; ``job``: that of one of several drains, empty for the only one."""
    if as_json:
        fields = {"member": member, "phase": phase, "sentence": sentence, "outcome": outcome}
        click.echo(json.dumps({"job": job, **fields} if job else fields))
    else:
        click.echo(printable(f"{f'{member}  ' if job else ''}{phase:<10} {sentence}"))


def _about(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command about one member, or about all on a node."""

    @functools.wraps(command)
    def read(member: str | None, node: str | None, cancels: bool, **arguments: Any) -> Any:
        ctx = click.get_current_context()
        if member is None and node is None:
            raise click.UsageError("Missing argument 'MEMBER', or --node", ctx)
        if member is not None and node is not None:
            raise click.UsageError("--node is for all on a node: leave MEMBER out", ctx)
        if node is not None and cancels:
            raise click.UsageError("--cancel takes one drain back: name its MEMBER", ctx)
        if node is not None and not node.strip():
            raise click.UsageError("--node: expected the name of a node", ctx)
        return command(member=member, node=node, cancels=cancels, **arguments)

    read = click.option(
        "--cancel", "cancels", is_flag=True, help="Take a drain back, unless it is granted."
    )(read)
    read = click.option(
        "--node", metavar="NODE", help="Drain all pods on this node, of all jobs or of --job."
    )(read)
    return click.argument("member", metavar="[MEMBER]", required=False, shell_complete=pod_names)(
        read
    )


@click.command(
    cls=Command,
    statuses={
        3: "with --wait: the deadline passed first",
        4: "with --wait: it was cancelled",
        5: "with --wait: the member was lost first",
        6: "with --wait: released without a save: nothing to save, or a script takes no part",
    },
    epilog="""\b
Examples:
  muster drain trainer-3 --job digits --wait
  muster drain trainer-3 --job digits --cancel
  muster drain --node gpu-17 --wait
""",
)
@_about
@configured_by(JobConfig, elsewhere=IN_THE_CLUSTER, all_jobs_by="node")
@click.option("--deadline", default="60s", show_default=True, metavar="TIME", help="Time it has.")
@click.option("--reason", default="asked for by hand", show_default=True, help="For the history.")
@click.option("--wait", is_flag=True, help="Print each phase, until the drain is over.")
@printed
def drain(
    config: StoreConfig,
    member: str | None,
    node: str | None,
    deadline: str,
    reason: str,
    wait: bool,
    cancels: bool,
    as_json: bool,
) -> int:
    """Drain MEMBER: delist it at once, save the same step on all ranks, let it leave.

    Its launcher is then out of the job and stays idle until its pod is deleted, or until the drain
    is cancelled. --node drains all pods on a node: each job saves once for all that it has there.
    The exit status is the worst of theirs.
    """
    why = read_option("--reason", free_text, reason)
    if node is not None:
        deadline_s = read_option("--deadline", duration_s(1, 86_400), deadline)
        asked = NodeDrain(node, why, deadline_s, wait=wait, as_json=as_json)
        return asyncio.run(drain_node(config, asked))
    assert isinstance(config, JobConfig)
    assert member is not None
    by_hand = DrainByHand(config, member, why, partial(show, "", as_json=as_json))
    if cancels:
        return asyncio.run(by_hand.cancel())
    deadline_s = read_option("--deadline", duration_s(1, 86_400), deadline)
    return asyncio.run(by_hand.drain(deadline_s, wait))
