# SPDX-License-Identifier: Apache-2.0
"""The command line ``muster``: each command is imported only when it is asked for.

Exit status: 0 done, 2 usage or configuration, 66 no such job, 69 store not reachable,
70 a defect of Muster.
"""

from __future__ import annotations

import os
import sys
import traceback

import click

from console import grpc_log
from console.help import CommandsByTask
from console.version import print_version
from console.wrapping import wrapped
from launcher_shim.exit_status import (
    EXIT_BROKEN_PIPE,
    EXIT_DEFECT,
    EXIT_INTERRUPTED,
    EXIT_NO_JOB,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
)
from rdzv.errors import (
    ClusterError,
    ConfigError,
    JobNotFound,
    MembershipError,
    MusterError,
    StoreError,
)

_PREFIX = "muster: "

ALIASES = {"why": "doctor"}
"""Short names of commands."""

TASKS = {
    "Start here": {
        "local": "console.local.command:local",
        "inject": "console.inject:inject",
        "doctor": "console.doctor.command:doctor",
    },
    "Look at a job": {
        "status": "console.job.status:status",
        "hosts": "console.job.hosts:hosts",
        "history": "console.job.history:history",
    },
    "Operate a job": {
        "drain": "console.job.drain:drain",
        "set": "console.job.bounds:set_values",
        "pause": "console.job.pause:pause",
        "resume": "console.job.pause:resume",
        "admit": "console.job.admit:admit",
        "forget": "console.job.forget:forget",
    },
    "Set up a store": {
        "store": "console.store:store",
        "store-role": "console.store_role:store_role",
    },
    "Run in a cluster": {"controller": "console.controller:controller"},
    "Run in a pod": {
        "agent": "console.agent:agent",
        "notice": "console.notice:notice",
    },
    "About Muster": {"version": "console.version:version"},
}


@click.group(
    cls=CommandsByTask,
    tasks=TASKS,
    aliases=ALIASES,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Shell completion, for bash (zsh and fish alike):
  eval "$(_MUSTER_COMPLETE=bash_source muster)"
""",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=print_version,
    help="Print the versions of Muster, Python and torch, and end.",
)
def muster() -> None:
    """Keep elastic training jobs running while their pods come and go."""


def main() -> None:
    """Run the command line and exit with the command's return value, or its error's status."""
    grpc_log.switch_off()
    try:
        status = muster.main(prog_name="muster", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(status)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        _complain(_sentence(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output has exited; Python must not try to flush the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_BROKEN_PIPE)
    except MusterError as error:
        _complain(str(error))
        sys.exit(_status(error))
    except Exception:
        traceback.print_exc()
        click.echo("muster: this is a defect of muster, please report it", err=True)
        sys.exit(EXIT_DEFECT)


def _complain(text: str) -> None:
    for line in text.splitlines():
        click.echo(wrapped(f"{_PREFIX}{line}", sys.stderr, len(_PREFIX)), err=True)


def _sentence(error: click.ClickException) -> str:
    """Return the message in the form of every other error, with a pointer to ``--help``."""
    context = getattr(error, "ctx", None)
    text = error.format_message().rstrip(".")
    return f"{text}\nsee {context.command_path} --help" if context else text


def _status(error: MusterError) -> int:
    if isinstance(error, JobNotFound):
        return EXIT_NO_JOB
    if isinstance(error, ConfigError | MembershipError):
        return EXIT_USAGE
    away = isinstance(error, StoreError | ClusterError)
    return EXIT_UNAVAILABLE if away else EXIT_DEFECT


if __name__ == "__main__":
    main()
