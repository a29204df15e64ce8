# SPDX-License-Identifier: Apache-2.0
"""``muster local``: the command line."""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import click
from click.core import ParameterSource
from rich.console import Console

from console.local.events import ACTIONS, read_event
from console.local.horovod_line import HorovodLine
from console.local.launch_line import LaunchLine, read_launch_line
from console.local.session import Places, run_session
from console.local.settings import MAX_NODES, Settings
from rdzv.errors import ConfigError

Given = TypeVar("Given")
Read = TypeVar("Read")

_EVENTS_HELP = "\n".join(f"  {action:<15} {what}" for action, what in ACTIONS.items())


@click.command(
    "local",
    short_help="An elastic job on this machine: simulated nodes, no Kubernetes, no root.",
    context_settings={"allow_interspersed_args": False, "show_default": True},
    epilog=f"""\b
Events, as in --event kill:rank0@15s (a node, or the one that hosts a rank then; seconds or
minutes after the start; add@75s after a kill replaces the killed node):
{_EVENTS_HELP}

A node is like a pod with restart policy OnFailure: a torchrun that fails is started again after
one second, up to --restarts times, unless the job is closed by then. All nodes share the directory
CHECKPOINT_DIR (where it is not set, a new one beside the logs). The exit status is the job's: 0 if
it finished, else that of the first torchrun that failed for good; 130 after Ctrl-C.

\b
Example:
  muster local --nodes 3 --max 4 --event add@30s --event kill:rank0@60s \\
      --report report -- torchrun --nproc-per-node=2 train.py
""",
)
@click.option("--nodes", default=2, help="Nodes at the start.")
@click.option(
    "--min",
    "min_nodes",
    default=1,
    envvar="MUSTER_MIN",
    show_envvar=True,
    help="Train with no fewer nodes than this.",
)
@click.option(
    "--max",
    "max_nodes",
    type=int,
    envvar="MUSTER_MAX",
    show_envvar=True,
    help="Train with no more nodes than this.  [default: all that --nodes and add events start]",
)
@click.option("--event", "event_texts", multiple=True, metavar="ACTION[:NODE]@TIME", help="Below.")
@click.option("--restarts", default=3, help="How often a torchrun that failed restarts.")
@click.option("--report", type=click.Path(path_type=Path), help="Write timeline.json, world.svg.")
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    help="Where the nodes' logs go.  [default: a new directory, printed]",
)
@click.option(
    "--lease-ttl",
    "lease_ttl_s",
    default=10.0,
    envvar="MUSTER_LEASE_TTL",
    show_envvar=True,
    help="Seconds after which a silent node counts as lost.",
)
@click.option(
    "--grace",
    "grace_s",
    default=30.0,
    envvar="MUSTER_GRACE_S",
    show_envvar=True,
    help="Seconds that a drained node has: a pod's terminationGracePeriodSeconds.",
)
@click.option(
    "--etcd-endpoints",
    envvar="MUSTER_ETCD_ENDPOINTS",
    show_envvar=True,
    help="Use this etcd.  [default: a store of this run's own]",
)
@click.option(
    "--namespace",
    default="local",
    envvar="MUSTER_NAMESPACE",
    show_envvar=True,
    help="Of the job, in the store.",
)
@click.option(
    "--job",
    default="local",
    envvar="MUSTER_JOB",
    show_envvar=True,
    help="Its name, also torch's run id.",
)
@click.option(
    "--native",
    is_flag=True,
    help="Leave Muster out, for comparison: torchrun's own rendezvous, held by node-0.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def local(
    context: click.Context,
    nodes: int,
    min_nodes: int,
    max_nodes: int | None,
    event_texts: Sequence[str],
    restarts: int,
    report: Path | None,
    log_dir: Path | None,
    lease_ttl_s: float,
    grace_s: float,
    etcd_endpoints: str | None,
    namespace: str,
    job: str,
    native: bool,
    command: Sequence[str],
) -> None:
    """Run an elastic job on this machine.

    Each simulated node has a sidecar and a torchrun; nodes are added, killed and frozen as you
    say; a timeline shows what came of it.
    """
    faults: list[str] = []
    events = [event for text in event_texts if (event := _try(faults, read_event, text))]
    line = _try(faults, _find_launcher, command)
    added = sum(event.action == "add" for event in events)
    max_nodes = min(nodes + added, MAX_NODES) if max_nodes is None else max_nodes
    if not 1 <= nodes <= MAX_NODES:
        faults.append(f"--nodes {nodes}: choose from 1 to {MAX_NODES}")
    if not 1 <= min_nodes <= max_nodes:
        faults.append(
            f"--min {min_nodes} and --max {max_nodes}: choose 1 or more, and no more than --max"
        )
    if grace_s < 1:
        faults.append(f"--grace {grace_s:g}: give a node 1 s or more")
    for flag, directory in (("--report", report), ("--log-dir", log_dir)):
        if directory is not None:
            _try(faults, _make_directory, (flag, directory))
    if sys.platform != "linux":
        faults.append("muster local finds its processes in /proc: run it on Linux")
    if isinstance(line, HorovodLine):
        if native:
            faults.append(
                "--native compares torchrun's own rendezvous; horovodrun has none: leave it out"
            )
        if context.get_parameter_source("restarts") is not ParameterSource.DEFAULT:
            faults.append(
                "--restarts is for torchrun; horovodrun is not started again, because what it "
                "trained is in its workers' memory: leave it out"
            )
    if line is None or faults:
        raise click.UsageError("\n".join(faults))
    logs = (log_dir or Path(tempfile.mkdtemp(prefix="muster-logs-"))).absolute()
    settings = Settings(
        run=uuid.uuid4().hex,
        namespace=namespace,
        job=job,
        line=line,
        nodes=nodes,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        restarts=restarts,
        lease_ttl_s=lease_ttl_s,
        grace_s=grace_s,
        checkpoints=logs / "checkpoints",
        endpoints=etcd_endpoints,
        native=native,
    )
    places = Places(logs, report)
    context.exit(asyncio.run(run_session(settings, events, places, Console())))


def _try(faults: list[str], read: Callable[[Given], Read], given: Given) -> Read | None:
    try:
        return read(given)
    except ConfigError as fault:
        faults.append(str(fault))
        return None


def _make_directory(place: tuple[str, Path]) -> None:
    flag, path = place
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be made ({error.strerror})") from error


def _find_launcher(command: Sequence[str]) -> LaunchLine | HorovodLine:
    line = read_launch_line(command)
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0]} is not found: activate the environment that it is installed in, "
            "or give its full path"
        )
    if isinstance(line, HorovodLine):
        own_name = socket.gethostname()
        try:
            socket.gethostbyname(own_name)
        except OSError as error:
            raise ConfigError(
                f"this machine's own name, {own_name}, has no address, which Horovod's workers "
                f"need to meet: add a line '127.0.0.1 {own_name}' to /etc/hosts"
            ) from error
    return line
