# SPDX-License-Identifier: Apache-2.0
"""Options, output and claims that ``muster scaleout`` and ``muster scalein`` share."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from time import time
from typing import TypeVar

import click

from agent.telemetry.logs import printable
from console.job.drain import requester
from console.remote.scaling.claim import GRACE_S, OperationClaim
from rdzv.errors import ConfigError

T = TypeVar("T")

POLL_S = 1.0
"""Interval at which the job is looked at. Shorter: more commands in its sidecars."""

TIMEOUT = "10m"


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
