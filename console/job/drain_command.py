# SPDX-License-Identifier: Apache-2.0
"""``muster drain``: a notice by hand, for one pod or for all on a node."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from agent.config.job import JobConfig, StoreConfig
from agent.config.parsers import duration_s, free_text
from agent.telemetry.logs import printable
from console.completion import pod_names
from console.help import Command
from console.job.drain import DrainByHand
from console.job.node_drain import NodeDrain, drain_node
from console.options import configured_by, printed
from rdzv.errors import ConfigError

T = TypeVar("T")

IN_THE_CLUSTER = "console.remote.node_drain:in_the_cluster"
"""The function that runs the command in a cluster."""


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
    why = _read("--reason", free_text, reason)
    if node is not None:
        deadline_s = _read("--deadline", duration_s(1, 86_400), deadline)
        asked = NodeDrain(node, why, deadline_s, wait=wait, as_json=as_json)
        return asyncio.run(drain_node(config, asked))
    assert isinstance(config, JobConfig)
    assert member is not None
    by_hand = DrainByHand(config, member, why, _print_json if as_json else _print_line)
    if cancels:
        return asyncio.run(by_hand.cancel())
    return asyncio.run(by_hand.drain(_read("--deadline", duration_s(1, 86_400), deadline), wait))


def _read(flag: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {text!r} is wrong: {error}") from error


def _print_line(member: str, phase: str, sentence: str, ending: str) -> None:
    click.echo(printable(f"{phase:<10} {sentence}"))


def _print_json(member: str, phase: str, sentence: str, ending: str) -> None:
    fields = {"member": member, "phase": phase, "sentence": sentence, "outcome": ending}
    click.echo(json.dumps(fields))
