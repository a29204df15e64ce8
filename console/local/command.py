# SPDX-License-Identifier: Apache-2.0
"""``muster local``: the command line, and the drill that ``--demo`` stands for."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from console.help import Command
from console.local.request import Options, read_request
from console.local.session import run_session
from console.local.settings import ACTIONS
from launcher_shim.pod.launchers import CENTRAL
from rdzv.errors import ConfigError
from rdzv.records.policy import JobPolicy
from rdzv.settings import settings_of

SCRIPT = Path(__file__).with_name("demo_script.py")

_DRILL: Mapping[str, Any] = {
    "nodes": 3,
    "event_texts": ("drain:rank0@world3+3s", "add@world2+3s", "kill:rank0@world3+3s"),
}


def with_demo(options: Mapping[str, Any], defaults: Set[str]) -> dict[str, Any]:
    """Return ``options`` with the demo's command, and its drill for those that are ``defaults``.

    Raises ``ConfigError`` if a command is given, too.
    """
    if options["command"]:
        raise ConfigError("--demo has a script of its own: leave out the command, or --demo")
    drill = _DRILL if _DRILL.keys() <= defaults else {}
    return {**options, **drill, "command": (*_torchrun(), str(SCRIPT))}


def _torchrun() -> tuple[str, ...]:
    """Return the words that start torchrun: the shell's, else that of the Python that runs this."""
    if shutil.which("torchrun") is not None:
        return ("torchrun",)
    return (sys.executable, "-m", "torch.distributed.run")


POLICY = settings_of(JobPolicy, "local")


def _policy_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with an option for each setting of a job's policy but its bounds."""
    for name, setting in reversed(POLICY.items()):
        option = click.option(
            setting.flag,
            name,
            default=setting.default,
            metavar=setting.metavar,
            envvar=setting.variable,
            show_envvar=True,
            show_default=setting.otherwise,
            help=setting.why,
        )
        command = option(command)
    return command


@click.command(
    "local",
    cls=Command,
    statuses={
        0: "the job finished",
        1: "the same error before any step, or, with --strict, an event that did nothing",
    },
    context_settings={"allow_interspersed_args": False, "show_default": True},
    tables={"Events": ACTIONS},
    epilog=f"""\
An event is as in --event kill:rank0@15s: of a node, or of the one that hosts a rank then; seconds
or minutes after the start, or, as world3+5s, after the first step of a world of 3 ranks. add@75s
after a kill replaces the killed node.

A node is like a pod with restart policy OnFailure: a torchrun that fails is started again after
one second, up to --restarts times, unless the job is closed by then. All nodes share the directory
CHECKPOINT_DIR (where it is not set, a new one beside the logs). The exit status is the job's: 0 if
it finished, else that of the first torchrun that failed for good; 130 after Ctrl-C.

\b
Examples:
  muster local --demo --report report
  muster local --nodes 3 --max 4 --event add@30s --event kill:rank0@60s \\
      --report report -- torchrun --nproc-per-node=2 train.py
  muster local --nodes 2 --max 4 --event add@30s -- {CENTRAL.name} python train.py
""",
)
@click.option("--nodes", default=2, metavar="N", help="Nodes at the start.")
@click.option(
    "--min",
    "min_nodes",
    default=1,
    metavar="N",
    envvar="MUSTER_MIN",
    show_envvar=True,
    help="Train with no fewer nodes than this.",
)
@click.option(
    "--max",
    "max_nodes",
    type=int,
    metavar="N",
    envvar="MUSTER_MAX",
    show_envvar=True,
    show_default="all that --nodes and add events start",
    help="Train with no more nodes than this.",
)
@_policy_options
@click.option(
    "--event",
    "event_texts",
    multiple=True,
    metavar="ACTION[:NODE]@TIME",
    help="What happens to a node, and when: see Events.",
)
@click.option(
    "--restarts", default=3, metavar="N", help="How often a torchrun that failed restarts."
)
@click.option(
    "--step",
    "step_text",
    metavar="REGEX",
    show_default="step 120, a bar of tqdm, and their kind",
    help="Find the step in a line of the script's output: the first group.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write timeline.json, world.svg.",
)
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    show_default="a new directory, printed",
    help="Where the nodes' logs go.",
)
@click.option(
    "--lease-ttl",
    "lease_text",
    default="10s",
    metavar="TIME",
    envvar="MUSTER_LEASE_TTL",
    show_envvar=True,
    help="After this a silent node counts as lost; rounded up to whole seconds.",
)
@click.option(
    "--grace",
    "grace_text",
    default="30s",
    metavar="TIME",
    envvar="MUSTER_GRACE_S",
    show_envvar=True,
    help="How long a drained node has: a pod's terminationGracePeriodSeconds.",
)
@click.option(
    "--etcd-endpoints",
    metavar="HOST:PORT,…",
    envvar="MUSTER_ETCD_ENDPOINTS",
    show_envvar=True,
    show_default="a store of this run's own",
    help="Use this etcd; what it asks for comes from MUSTER_ETCD_CACERT and its kind, as for"
    " muster agent.",
)
@click.option(
    "--namespace",
    default="local",
    metavar="NAME",
    envvar="MUSTER_NAMESPACE",
    show_envvar=True,
    help="Of the job, in the store.",
)
@click.option(
    "--job",
    default="local",
    metavar="NAME",
    envvar="MUSTER_JOB",
    show_envvar=True,
    help="Its name, also torch's run id.",
)
@click.option(
    "--native",
    is_flag=True,
    help="Run the drill without Muster: torchrun's own rendezvous, held by node-0.",
)
@click.option(
    "--compare",
    is_flag=True,
    help="Run the drill on torchrun alone as well, and print what each event cost there.",
)
@click.option(
    "--keep-going",
    is_flag=True,
    help="Don't stop when the same error ends three rounds before the first step.",
)
@click.option(
    "--demo",
    is_flag=True,
    help="Train a small net that is part of Muster, on 3 nodes, with a drain, an add and a kill.",
)
@click.option(
    "--warm",
    is_flag=True,
    help="Workers start warm, as with MUSTER_WARM=1 in a pod: they need not import torch again.",
)
@click.option("--strict", is_flag=True, help="End with 1 if an event did nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line: what happens.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def local(context: click.Context, /, as_json: bool, **options: Any) -> None:
    """Run an elastic job on this machine.

    Each simulated node has a sidecar and a torchrun; nodes are added, killed and frozen as you
    say; a timeline shows what came of it.
    """
    defaults = {
        name for name in options if context.get_parameter_source(name) is ParameterSource.DEFAULT
    }
    try:
        if options.pop("demo"):
            options = with_demo(options, defaults)
        texts = {name: options.pop(name) for name in POLICY}
        given = Options(**options, policy_texts=texts, restarts_given="restarts" not in defaults)
        request = read_request(given)
    except ConfigError as faults:
        raise click.UsageError(str(faults)) from faults
    run = run_session(
        request.settings,
        request.events,
        request.directories,
        Console(),
        as_json=as_json,
        compares=given.compare,
    )
    context.exit(asyncio.run(run))
