# SPDX-License-Identifier: Apache-2.0
"""``muster notice``: the sidecar's own preStop hook."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import click

from console.help import Command
from launcher_shim.rundir import layout
from rdzv.errors import ConfigError
from rdzv.sentences import named

ANSWER_TIMEOUT_S = 5.0


@click.command(
    cls=Command,
    epilog="\b\nExample, as the sidecar's preStop hook:\n"
    "  muster notice --reason 'the pod is deleted'",
)
@click.option(
    "--run-dir",
    metavar="DIR",
    default="/var/run/muster",
    envvar="MUSTER_RUN_DIR",
    show_default=True,
    show_envvar=True,
    help="The sidecar's run directory.",
)
@click.option(
    "--reason",
    metavar="TEXT",
    default="the pod is being ended",
    show_default=True,
    help="For people.",
)
def notice(run_dir: str, reason: str) -> int:
    """Start the drain of this pod, and return as soon as its sidecar has taken the notice.

    Given more than once, it is the same drain.
    """
    path = Path(run_dir) / layout.NOTICE_SOCKET
    request = json.dumps({"notice": "prestop", "reason": reason, "seconds_left": None}) + "\n"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(ANSWER_TIMEOUT_S)
            client.connect(str(path))
            client.sendall(request.encode())
            answer = client.makefile("rb").readline()
    except OSError as error:
        raise ConfigError(
            f"no sidecar answers at {path} ({error.strerror or error}):"
            f" check {named('--run-dir')} and that it runs"
        ) from error
    try:
        phase = json.loads(answer)
    except ValueError as error:
        raise ConfigError(f"the sidecar at {path} ended before it took the notice") from error
    if phase["phase"] == "refused":
        raise ConfigError(f"the notice was refused: {phase['sentence']}")
    click.echo(f"{phase['phase']}: {phase['sentence']}")
    return 0
