# SPDX-License-Identifier: Apache-2.0
"""``muster local``: the command line."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console

from agent.config.sidecar import Config, StoreConfig
from agent.config.size_faults import size_faults
from agent.config.table import load, settings_of
from console.help import Command
from console.local.launch.horovod_line import HorovodLine
from console.local.launch.launch_line import LaunchLine, read_launch_line
from console.local.launch.settings import MAX_NODES, LocalSettings
from console.local.nodes.events import ACTIONS, read_event
from console.local.session import Directories, run_session
from rdzv.errors import ConfigError
from rdzv.store.access import Access

Given = TypeVar("Given")
Read = TypeVar("Read")


@click.command(
    "local",
    cls=Command,
    statuses={
        0: "the job finished",
        1: "the same error before any step, or, with --strict, an event that did nothing",
    },
    short_help="An elastic job on this machine: no Kubernetes, no root.",
    context_settings={"allow_interspersed_args": False, "show_default": True},
    tables={"Events": ACTIONS},
    epilog="""\
An event is as in --event kill:rank0@15s: of a node, or of the one that hosts a rank then; seconds
or minutes after the start, or, as world3+5s, after the first step of a world of 3 ranks. add@75s
after a kill replaces the killed node.

A node is like a pod with restart policy OnFailure: a torchrun that fails is started again after
one second, up to --restarts times, unless the job is closed by then. All nodes share the directory
CHECKPOINT_DIR (where it is not set, a new one beside the logs). The exit status is the job's: 0 if
it finished, else that of the first torchrun that failed for good; 130 after Ctrl-C.

\b
Examples:
  muster local --nodes 3 --max 4 --event add@30s --event kill:rank0@60s \\
      --report report -- torchrun --nproc-per-node=2 train.py
  muster local --nodes 2 --max 4 --event add@30s -- horovodrun python train.py
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
@click.option(
    "--sizes",
    "sizes_text",
    default="",
    metavar="N,…",
    envvar="MUSTER_SIZES",
    show_envvar=True,
    show_default="any from min to max",
    help="Numbers of nodes that may train together.",
)
@click.option(
    "--unit",
    "unit_text",
    default="1",
    metavar="N",
    envvar="MUSTER_UNIT",
    show_envvar=True,
    help="Train with a multiple of so many nodes.",
)
@click.option(
    "--gather",
    "gather_text",
    default="2s",
    metavar="TIME",
    envvar="MUSTER_GATHER",
    show_envvar=True,
    help="How long the first newcomer waits for others to be let in with it: short, as here all"
    " start at once and a new world costs a second.",
)
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
    help="Leave Muster out, for comparison: torchrun's own rendezvous, held by node-0.",
)
@click.option(
    "--keep-going",
    is_flag=True,
    help="Go on where the same error ends three rounds before any step.",
)
@click.option("--strict", is_flag=True, help="End with 1 if an event did nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line: what happens.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def local(
    context: click.Context,
    nodes: int,
    min_nodes: int,
    max_nodes: int | None,
    sizes_text: str,
    unit_text: str,
    gather_text: str,
    event_texts: Sequence[str],
    restarts: int,
    report: Path | None,
    log_dir: Path | None,
    lease_text: str,
    grace_text: str,
    etcd_endpoints: str | None,
    namespace: str,
    job: str,
    native: bool,
    keep_going: bool,
    strict: bool,
    as_json: bool,
    command: Sequence[str],
) -> None:
    """Run an elastic job on this machine.

    Each simulated node has a sidecar and a torchrun; nodes are added, killed and frozen as you
    say; a timeline shows what came of it.
    """
    faults: list[str] = []
    events = [event for text in event_texts if (event := _try(faults, read_event, text))]
    line = _try(faults, _find_launcher, command)
    access = _try(faults, _access_to, etcd_endpoints) if etcd_endpoints else None
    lease_ttl_s = _try(faults, _read_as_sidecar, ("--lease-ttl", "lease_ttl_s", lease_text))
    grace_s = _try(faults, _read_as_sidecar, ("--grace", "grace_s", grace_text))
    sizes = _try(faults, _read_as_sidecar, ("--sizes", "sizes", sizes_text))
    unit = _try(faults, _read_as_sidecar, ("--unit", "unit", unit_text))
    gather_s = _try(faults, _read_as_sidecar, ("--gather", "gather_s", gather_text))
    added = sum(event.action == "add" for event in events)
    max_nodes = min(nodes + added, MAX_NODES) if max_nodes is None else max_nodes
    faults += _faults_of_numbers(nodes, min_nodes, max_nodes)
    if not faults:
        bounds = {"min_nodes": min_nodes, "max_nodes": max_nodes, "sizes": sizes, "unit": unit}
        faults += size_faults(bounds)
    for flag, directory in (("--report", report), ("--log-dir", log_dir)):
        if directory is not None:
            _try(faults, _make_directory, (flag, directory))
    if sys.platform != "linux":
        faults.append("muster local finds its processes in /proc: run it on Linux")
    if isinstance(line, HorovodLine):
        restarts_given = context.get_parameter_source("restarts") is not ParameterSource.DEFAULT
        faults += _faults_of_horovodrun(native=native, restarts_given=restarts_given)
    if isinstance(line, LaunchLine) and line.script and not Path(line.script).is_file():
        faults.append(f"{line.script}: there is no such file for torchrun to start")
    if line is None or lease_ttl_s is None or grace_s is None or gather_s is None:
        raise click.UsageError("\n".join(faults))
    if sizes is None or unit is None or faults:
        raise click.UsageError("\n".join(faults))
    logs = (log_dir or Path(tempfile.mkdtemp(prefix="muster-logs-"))).absolute()
    checkpoints = Path(os.environ.get("CHECKPOINT_DIR") or logs / "checkpoints").absolute()
    _make_directory(("CHECKPOINT_DIR", checkpoints))
    settings = LocalSettings(
        run=uuid.uuid4().hex,
        namespace=namespace,
        job=job,
        line=line,
        nodes=nodes,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        restarts=restarts,
        lease_ttl_s=float(lease_ttl_s),
        grace_s=grace_s,
        sizes=sizes,
        unit=unit,
        gather_s=gather_s,
        checkpoints=checkpoints,
        access=access,
        native=native,
        keep_going=keep_going,
        strict=strict,
    )
    places = Directories(logs, report)
    context.exit(asyncio.run(run_session(settings, events, places, Console(), as_json=as_json)))


def _faults_of_numbers(nodes: int, min_nodes: int, max_nodes: int) -> Iterator[str]:
    if not 1 <= nodes <= MAX_NODES:
        yield f"--nodes {nodes}: choose from 1 to {MAX_NODES}"
    if not 1 <= min_nodes <= max_nodes:
        yield f"--min {min_nodes} and --max {max_nodes}: choose 1 or more, and no more than --max"


def _faults_of_horovodrun(*, native: bool, restarts_given: bool) -> Iterator[str]:
    """What is said to torchrun alone."""
    if native:
        yield "--native compares torchrun's own rendezvous; horovodrun has none: leave it out"
    if restarts_given:
        yield (
            "--restarts is for torchrun; horovodrun is not started again, because what it "
            "trained is in its workers' memory: leave it out"
        )


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


def _read_as_sidecar(given: tuple[str, str, str]) -> Any:
    """Read a text as the sidecars will; ``given``: flag, name of the setting there, text."""
    flag, name, text = given
    setting = settings_of(Config)[name]
    try:
        return setting.parse(text)
    except ValueError as error:
        raise ConfigError(
            f"{flag} ({setting.variable}): {setting.quote(text)} is wrong: {error}"
        ) from error


def _access_to(etcd_endpoints: str) -> Access:
    return load(StoreConfig, {"etcd_endpoints": etcd_endpoints}, os.environ).access


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
