# SPDX-License-Identifier: Apache-2.0
"""Options, output and claims that ``muster scaleout`` and ``muster scalein`` share."""

from __future__ import annotations

import functools
import os
import secrets
import socket
from collections.abc import Callable
from time import time
from typing import Any, TypeVar

import click

from agent.config.parsers import count as count_of
from agent.config.parsers import duration_s
from agent.telemetry.logs import printable
from console.job.drain import requester
from console.remote.reach import ClusterOptions, through_the_api_server
from console.remote.scaling.claim import GRACE_S, OperationClaim
from console.running import found
from rdzv.errors import ConfigError

T = TypeVar("T")
Command = Callable[..., Any]

POLL_S = 1.0
"""Interval at which the job is looked at. Shorter: more commands in its sidecars."""

NUMBER = count_of(1, 100_000)
"""Parses a number of pods."""


def scaling(*, count: str, timeout: str, dry_run: str) -> Callable[[Command], Command]:
    """Return a decorator that gives a command JOB, the cluster, and what both commands take.

    ``count``, ``timeout`` and ``dry_run``: the help of the options. The command gets ``count``, or
    None, as a number, and ``timeout_s``.
    """
    shared = (
        click.argument("job", metavar="JOB"),
        through_the_api_server,
        click.option("--count", metavar="N", help=count),
        click.option("--timeout", metavar="TIME", default="10m", show_default=True, help=timeout),
        click.option("--dry-run", is_flag=True, help=dry_run),
    )

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def parsed(count: str | None, timeout: str, **arguments: Any) -> Any:
            _refuse_local(arguments["job"], arguments["options"])
            limit_s = read("--timeout", duration_s(1, 86_400), timeout) or 0.0
            return command(count=read("--count", NUMBER, count), timeout_s=limit_s, **arguments)

        return functools.reduce(lambda made, add: add(made), reversed(shared), parsed)

    return decorate


def _refuse_local(job: str, options: ClusterOptions) -> None:
    """Raise ``ConfigError`` for a job that ``muster local`` runs here: it has no owner to scale."""
    named = {"job": job, "namespace": options.namespace}
    if not (options.kubeconfig or options.context) and found(named, os.environ) is not None:
        raise ConfigError(
            f"muster local runs job {job} here, and its nodes have no owner: muster drain NODE"
            " takes one out after a save, and muster local --event=add@... plans one more"
        )


def read(flag: str, parse: Callable[[str], T], text: str | None) -> T | None:
    """Parse the value of a flag; None if it is not given. Raises ``ConfigError``."""
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {text!r} is wrong: {error}") from error


def new_claim(what: str, timeout_s: float) -> OperationClaim:
    """Return the claim of an operation of this process that begins now."""
    return OperationClaim(
        what, requester(socket.gethostname()), time() + timeout_s + GRACE_S, _token()
    )


def say(text: str) -> None:
    """Print one line as it happens."""
    click.echo(printable(text))


def note(text: str) -> None:
    """Print a remark that is not the result."""
    click.echo(f"muster: {printable(text)}", err=True)


def _token() -> str:
    return secrets.token_hex(8)
