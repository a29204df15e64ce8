# SPDX-License-Identifier: Apache-2.0
"""The command line ``muster``: each command is imported only when it is asked for.

Exit status: 0 done, 2 usage or configuration, 66 no such job, 69 store not reachable,
70 a bug in Muster.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from console.help import CommandsByTask, Entry, missing_extra
from console.styling import TERMINAL, coloured, wrapped
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
        "local": Entry(
            "console.local.command:local", "An elastic job on this machine: no Kubernetes, no root."
        ),
        "inject": Entry("console.inject:inject", "Add the sidecar to a manifest."),
        "doctor": Entry(
            "console.doctor.command:doctor", "Say why a job stands still, and what to do first."
        ),
    },
    "Run a job": {
        "submit": Entry(
            "console.submit.command:submit", "Make a training job in the cluster, and follow it."
        ),
        "scaleout": Entry(
            "console.remote.scaleout:scaleout", "Add pods to a job, and wait for them."
        ),
        "scalein": Entry("console.remote.scalein:scalein", "Save, then take pods away from a job."),
        "delete": Entry("console.submit.delete:delete", "Save on all ranks, then delete a job."),
    },
    "Look at a job": {
        "list": Entry("console.job.jobs:list_jobs", "List the jobs of a namespace, or of a store."),
        "get": Entry("console.job.jobs:get", "Show a job and its pods, one a row."),
        "status": Entry("console.job.status:status", "Show a job's state, its pods and rounds."),
        "top": Entry("console.job.top:top", "Show one job on one screen, with keys."),
        "hosts": Entry("console.job.status:hosts", "List hosts available to launchers."),
        "logs": Entry("console.logs.command:logs", "Show what training prints, by rank."),
        "history": Entry(
            "console.job.history:history", "Show joins, leaves, failures, drains and rounds."
        ),
    },
    "Operate a job": {
        "drain": Entry(
            "console.job.drain_command:drain", "Save on all ranks, then let a pod or a node leave."
        ),
        "set": Entry("console.job.by_hand:set_values", "Change a job's limits while it trains."),
        "pause": Entry("console.job.pause:pause", "Save and stop a job, until it is resumed."),
        "resume": Entry("console.job.pause:resume", "Resume a paused job from its last save."),
        "admit": Entry("console.job.by_hand:admit", "End a pod's quarantine."),
        "forget": Entry(
            "console.job.by_hand:forget", "Forget the last save, to train from scratch."
        ),
    },
    "Set up a store": {
        "store": Entry("console.store:store", "An etcd-like store for laptops and tests."),
        "store-role": Entry(
            "console.store:store_role", "Print or make one job's user and rights in the store."
        ),
    },
    "Run in a cluster": {
        "controller": Entry(
            "console.controller:controller", "Inject sidecars into labelled pods (in the chart)."
        )
    },
    "Run in a pod": {
        "agent": Entry("console.agent:agent", "The sidecar of one pod (in its image)."),
        "notice": Entry(
            "console.notice:notice", "Tell this pod's sidecar that the pod will leave."
        ),
    },
    "About Muster": {
        "help": Entry("console.about:show_help", "Show the help of a command, or store-options."),
        "version": Entry("console.about:version", "Print the versions of Muster, Python, torch."),
    },
}


def _print_version(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:
    if asked:
        from console.about import described

        click.echo(described())
        ctx.exit()


@click.group(
    cls=CommandsByTask,
    tasks=TASKS,
    aliases=ALIASES,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  muster local --nodes 3 --event kill:rank0@30s -- torchrun train.py
  muster list
  muster doctor digits

\b
Shell completion, for bash (zsh and fish alike):
  eval "$(_MUSTER_COMPLETE=bash_source muster)"
""",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the versions of Muster, Python and torch, and end.",
)
@click.pass_context
def muster(ctx: click.Context) -> None:
    """Keep elastic training jobs running while their pods come and go."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """Run the command line and exit with the command's return value, or its error's status."""
    try:
        # click strips colours where it sees no terminal, as if one of another machine shows them.
        color = True if os.environ.get(TERMINAL) else None
        status = muster.main(
            prog_name=program_name(sys.argv[0]), standalone_mode=False, color=color
        )
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
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (said := missing_extra(error)):
            _complain(said)
            sys.exit(EXIT_USAGE)
        import traceback

        traceback.print_exc()
        click.echo(
            "muster: this is a bug in Muster: please report it, with the lines above", err=True
        )
        sys.exit(EXIT_DEFECT)


def program_name(started_as: str) -> str:
    """Return the name in usage lines: ``kubectl muster`` if kubectl has started the program."""
    return "kubectl muster" if Path(started_as).name == "kubectl-muster" else "muster"


def _complain(text: str) -> None:
    for line in text.splitlines():
        shown = wrapped(f"{_PREFIX}{line}", sys.stderr, len(_PREFIX))
        prefix = coloured(_PREFIX, "fault", sys.stderr)
        click.echo(prefix + shown.removeprefix(_PREFIX), err=True)


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
