# SPDX-License-Identifier: Apache-2.0
"""The request made by a command line of ``muster local``; it reports all faults at once."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from agent.config import Config
from agent.job_config import JobConfig
from console.job.reading import look
from console.local.launch_line import (
    LaunchLine,
    interpreter_of,
    read_launch_line,
    script_fault,
)
from console.local.script_progress import read_pattern
from console.local.session import Directories
from console.local.settings import MAX_NODES, Event, LocalSettings, Reach, read_event
from launcher_shim.pod.launchers import CENTRAL
from rdzv.errors import ConfigError, JobNotFound
from rdzv.records.policy import POLICY_TABLE, JobPolicy
from rdzv.sentences import counted
from rdzv.settings import load, settings_of

Given = TypeVar("Given")
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options and the command, as the user gave them.

    ``…_text``: parsed as the sidecars parse the setting of that name. ``restarts_given``:
    ``restarts`` is not the default.
    """

    nodes: int
    min_nodes: int
    max_nodes: int | None
    policy_texts: Mapping[str, str]
    event_texts: Sequence[str]
    restarts: int
    restarts_given: bool
    report: Path | None
    log_dir: Path | None
    lease_text: str
    grace_text: str
    etcd_endpoints: str | None
    namespace: str
    job: str
    native: bool
    compare: bool
    warm: bool
    keep_going: bool
    step_text: str | None
    strict: bool
    command: Sequence[str]


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """A valid run: its settings, its events, and the directories of its files."""

    settings: LocalSettings
    events: Sequence[Event]
    directories: Directories


def read_request(options: Options) -> LocalRequest:
    """Parse and check all of ``options``; then create the directories that they name.

    Raises ``ConfigError`` with a line for each fault, ``StoreUnavailable`` if the user's store does
    not answer.
    """
    faults: list[str] = []
    events = [event for text in options.event_texts if (event := _try(faults, read_event, text))]
    line = _try(faults, _find_launcher, options.command)
    config = _try(faults, _read_job, options)
    step_pattern = _try(faults, read_pattern, options.step_text) if options.step_text else None
    texts = {
        "lease_ttl_s": ("--lease-ttl", options.lease_text),
        "grace_s": ("--grace", options.grace_text),
        **{name: (POLICY_TABLE[name].flag, text) for name, text in options.policy_texts.items()},
    }
    read: dict[str, Any] = {
        name: _try(faults, _read_as_sidecar, (flag, name, text))
        for name, (flag, text) in texts.items()
    }
    max_nodes = _max_nodes(options, events)
    numbers = [*_faults_of_numbers(options, max_nodes)]
    further = {name: read[name] for name in options.policy_texts}
    policy = JobPolicy(options.min_nodes, max_nodes)
    if not numbers and None not in further.values():
        policy = replace(policy, **further)
        numbers += JobPolicy.faults(asdict(policy))
        if line is not None and not numbers:
            is_central = line.launcher.is_central
            reach = Reach(options.nodes, line.slots, policy, launcher=is_central)
            numbers += reach.faults(events)
    faults += [*numbers, *_faults_of_launch(line, options)]
    if line is None or config is None or faults:
        raise ConfigError("\n".join(faults))
    if options.etcd_endpoints and not options.native:
        asyncio.run(_ask_store(config))
    for flag, directory in (("--report", options.report), ("--log-dir", options.log_dir)):
        if directory is not None:
            _make_directory((flag, directory))
    logs = (options.log_dir or Path(tempfile.mkdtemp(prefix="muster-logs-"))).absolute()
    checkpoints = Path(os.environ.get("CHECKPOINT_DIR") or logs / "checkpoints").absolute()
    _make_directory(("CHECKPOINT_DIR", checkpoints))
    settings = LocalSettings(
        run=uuid.uuid4().hex,
        namespace=options.namespace,
        job=options.job,
        line=line,
        nodes=options.nodes,
        policy=policy,
        restarts=options.restarts,
        lease_ttl_s=float(read["lease_ttl_s"]),
        grace_s=read["grace_s"],
        checkpoints=checkpoints,
        access=config.access if options.etcd_endpoints else None,
        native=options.native,
        warm=options.warm,
        keep_going=options.keep_going,
        step_pattern=step_pattern,
        strict=options.strict,
    )
    return LocalRequest(settings, events, Directories(logs, options.report))


def _max_nodes(options: Options, events: Sequence[Event]) -> int:
    if options.max_nodes is not None:
        return options.max_nodes
    added = sum(event.action == "add" for event in events)
    return min(options.nodes + added, MAX_NODES)


def _faults_of_numbers(options: Options, max_nodes: int) -> Iterator[str]:
    nodes, least = options.nodes, options.min_nodes
    if not 1 <= nodes <= MAX_NODES:
        yield f"--nodes {nodes}: choose from 1 to {MAX_NODES}"
    elif least < 1:
        yield f"--min {least}: choose 1 or more"
    elif max_nodes < 1:
        yield f"--max {max_nodes}: choose 1 or more"
    elif least > max_nodes and options.max_nodes is None:
        yield (
            f"--min {least}: only {counted(max_nodes, 'node')} start; lower --min, or start more"
            " by --nodes or add events"
        )
    elif least > max_nodes:
        yield f"--min ({least}) exceeds --max ({max_nodes})"


def _faults_of_launch(line: LaunchLine | None, options: Options) -> Iterator[str]:
    if sys.platform != "linux":
        yield "muster local finds its processes in /proc: run it on Linux"
    is_central = line is not None and line.launcher.is_central
    if line is not None and not is_central:
        yield from _faults_of_script(line)
    if options.native and options.compare:
        yield "--compare runs both, --native one of the two: give one of them"
    if not is_central:
        return
    # Options of torchrun only.
    if options.compare:
        without = f"{CENTRAL.name} does not train without hosts"
        yield f"--compare is for torchrun; {without}: leave it out"
    if options.step_text:
        yield f"--step is for torchrun: with {CENTRAL.name}, call muster.report_step(step)"
    if options.native:
        yield f"--native compares torchrun's own rendezvous; {CENTRAL.name} has none: leave it out"
    if options.restarts_given:
        yield (
            f"--restarts is for torchrun; {CENTRAL.name} is not started again, because what it "
            "trained is in its workers' memory: leave it out"
        )


def _faults_of_script(line: LaunchLine) -> Iterator[str]:
    if line.script and not Path(line.script).is_file():
        yield f"{line.script}: there is no such file for torchrun to start"
        return
    program = line.command[0]
    python = (program,) if line.program > 1 else interpreter_of(Path(shutil.which(program) or ""))
    script = None if "PYTHON_EXEC" in os.environ else line.script  # another Python runs it
    if python and (fault := script_fault(python, script, needs_torch=True)):
        yield fault


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
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {path}: this user cannot write there; choose another directory")


def _read_as_sidecar(given: tuple[str, str, str]) -> Any:
    """Parse a text as the sidecars will; ``given``: flag, name of the sidecar's setting, text."""
    flag, name, text = given
    setting = settings_of(Config)[name]
    try:
        return setting.parse(text)
    except ValueError as error:
        raise ConfigError(
            f"{flag} ({setting.variable}): {setting.quote(text)} is wrong: {error}"
        ) from error


def _read_job(options: Options) -> JobConfig:
    """Read the job and the access to its store; a store of this run's own needs no credentials."""
    flags = {
        "etcd_endpoints": options.etcd_endpoints,
        "namespace": options.namespace,
        "job": options.job,
    }
    return load(JobConfig, flags, os.environ if options.etcd_endpoints else {})


async def _ask_store(config: JobConfig) -> None:
    """Read the job; raises ``ConfigError`` if it has members, ``StoreUnavailable`` as ``look``."""
    try:
        view = await look(config)
    except JobNotFound:
        return
    if members := sorted(view.snapshot.members):
        verb = "is" if len(members) == 1 else "are"
        raise ConfigError(
            f"job {config.job} in namespace {config.namespace} is in use: {', '.join(members)}"
            f" {verb} registered; choose another --job, or wait until their leases end"
        )


def _find_launcher(command: Sequence[str]) -> LaunchLine:
    line = read_launch_line(command, os.environ)
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0]} is not found: activate the environment that it is installed in, "
            "or give its full path"
        )
    if line.launcher.is_central:
        own_name = socket.gethostname()
        try:
            socket.gethostbyname(own_name)
        except OSError as error:
            raise ConfigError(
                f"this machine's own name, {own_name}, has no address, which {CENTRAL.library}'s "
                f"workers need to meet: add a line '127.0.0.1 {own_name}' to /etc/hosts"
            ) from error
    return line
