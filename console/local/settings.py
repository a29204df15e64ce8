# SPDX-License-Identifier: Apache-2.0
"""The settings of a run, the environments that follow from them, and the events asked for.

An event is ``--event ACTION[:NODE]@TIME``. A time counts from the start, or, after ``worldN+``,
from the first step of a world of N ranks: a drill then takes the same course on a slow machine.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import console
from agent.job_config import StoreConfig
from console.local.launch_line import LaunchLine
from console.local.processes import NODE_MARK, RUN_MARK
from launcher_shim.rundir import layout
from rdzv.errors import ConfigError
from rdzv.records.policy import JobPolicy, variables_of
from rdzv.sentences import counted
from rdzv.settings import settings_of
from rdzv.store.access import Access

MAX_NODES = 64

LAUNCHER = "launcher"
"""The node that a central launcher runs on."""

ACTIONS = {
    "add": "start a node, empty; without a name under the lowest that is free",
    "drain": "the pod is deleted: notice and SIGTERM, SIGKILL after --grace; not replaced",
    "kill": "the whole node at once: sidecar, torchrun and workers (SIGKILL)",
    "kill-container": "torchrun and its workers at once; the container is restarted",
    "kill-launcher": "torchrun alone: its workers are orphans; the container is restarted",
    "kill-sidecar": "the sidecar alone (SIGKILL); it is started again",
    "stop": "freeze every process of the node (SIGSTOP)",
    "cont": "let a stopped node go on (SIGCONT)",
}

_UNIT_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_EVENT = re.compile(r"(?P<action>[a-z-]+)(?::(?P<target>[^@]*))?@(?P<time>.*)", re.DOTALL)
_TIME = re.compile(r"(\d+(?:\.\d+)?)([smh]?)", re.ASCII)
_WORLD_TIME = re.compile(r"world([1-9]\d{0,4})(?:\+(\d.*))?", re.ASCII | re.DOTALL)
_TARGET = re.compile(r"node-(0|[1-9]\d{0,3})|rank(0|[1-9]\d{0,3})|launcher", re.ASCII)


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """The settings of one run of ``muster local``."""

    run: str
    """Random name of this run, which marks its processes."""
    namespace: str
    """Namespace of the job in the store."""
    job: str
    """Name of the job, also torch's run id."""
    line: LaunchLine
    """The command of each node, or that of a central launcher."""
    nodes: int
    """Number of nodes at the start of the run."""
    policy: JobPolicy
    """The nodes that may train together, and how newcomers are gathered."""
    restarts: int
    """Limit of the restarts of a torchrun that failed. More: a script that always fails ends
    later."""
    lease_ttl_s: float
    """TTL of each member's lease, in seconds. Shorter: a node that was killed is evicted sooner,
    and so is one on a busy machine that is merely late."""
    checkpoints: Path
    """A directory that all nodes share, as a cluster's volume would be."""
    access: Access | None
    """Access to the store; None for an embedded one."""
    native: bool
    """Whether to leave Muster out, for comparison: node-0's torchrun then holds torch's own
    store."""
    grace_s: float = 30.0
    """Time from SIGTERM to SIGKILL of a node that is deleted, in seconds. Longer: a slow save ends
    in time; shorter: a script that ignores SIGTERM is gone sooner."""
    warm: bool = False
    """Whether workers start warm; see ``MUSTER_WARM``."""
    keep_going: bool = False
    """Whether to go on if the same error ends every round. Without it a script that always fails
    ends the run soon."""
    step_pattern: re.Pattern[str] | None = None
    """A pattern whose first group is the step in a line of output; None: those known here."""
    strict: bool = False
    """Whether an event that did nothing fails the run."""


def sidecar_command() -> tuple[str, ...]:
    """Return the sidecar's command, run by the interpreter that runs this."""
    return (sys.executable, "-P", "-m", "console.main", "agent")


def own_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return ``base`` with a PYTHONPATH by which that interpreter finds these packages anywhere."""
    return {**base, "PYTHONPATH": _joined(str(Path(console.__file__).parent.parent), base)}


@dataclass(frozen=True, slots=True)
class Pod:
    """The properties by which one node's sidecar differs from the others."""

    name: str
    uid: str
    role: Literal["worker", "launcher"]
    run_dir: Path
    c10d_port: int
    http_port: int
    tunnel_port: int = 0


def sidecar_environment(settings: LocalSettings, pod: Pod, endpoints: str) -> dict[str, str]:
    """Return the environment that a pod's specification would give the sidecar."""
    base = dict(os.environ)
    if settings.access is None:
        # The embedded store needs no credentials; those for the user's own store do not fit it.
        for setting in settings_of(StoreConfig).values():
            base.pop(setting.variable, None)
    return own_environment(base) | {
        RUN_MARK: settings.run,
        NODE_MARK: pod.name,
        "MUSTER_POD_UID": pod.uid,
        "MUSTER_NAMESPACE": settings.namespace,
        "MUSTER_JOB": settings.job,
        "MUSTER_ADDRESS": "127.0.0.1",
        "MUSTER_NODE": pod.name,
        "MUSTER_ROLE": pod.role,
        "MUSTER_SLOTS": str(settings.line.slots),
        **{name: text or "" for name, text in variables_of(asdict(settings.policy)).items()},
        "MUSTER_ETCD_ENDPOINTS": endpoints,
        "MUSTER_RUN_DIR": str(pod.run_dir),
        "MUSTER_C10D_PORT": "0",
        "MUSTER_RELAY_PORT": str(pod.c10d_port),
        "MUSTER_HTTP_PORT": str(pod.http_port),
        "MUSTER_TUNNEL_PORT": str(pod.tunnel_port),
        "MUSTER_LEASE_TTL": f"{settings.lease_ttl_s:g}",
        "MUSTER_GRACE_S": f"{settings.grace_s:g}",
        **({"MUSTER_WARM": "1"} if settings.warm else {}),
    }


def launcher_environment(
    settings: LocalSettings, node: str, run_dir: Path, delivered: Mapping[str, str]
) -> dict[str, str]:
    """Return the training container's environment; ``delivered``: torchrun's settings in it."""
    base = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        "CHECKPOINT_DIR": str(settings.checkpoints),
        RUN_MARK: settings.run,
        NODE_MARK: node,
        "MUSTER_RUN_DIR": str(run_dir),
    }
    return {**base, **delivered, "PYTHONPATH": _joined(str(run_dir / layout.MODULES), base)}


def native_delivery(settings: LocalSettings, port: int, *, is_host: bool) -> dict[str, str]:
    """Return torchrun's settings without Muster: torch's c10d rendezvous, at its best settings."""
    return {
        "PET_NNODES": f"{settings.policy.min_nodes}:{settings.policy.max_nodes}",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"localhost:{port}",
        "PET_RDZV_ID": settings.job,
        "PET_RDZV_CONF": f"is_host={int(is_host)},last_call_timeout=5",
        "PET_LOCAL_ADDR": "127.0.0.1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def read_delivery(text: str) -> dict[str, str]:
    """Parse the sidecar's ``env`` file: one ``KEY=VALUE`` per line."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def _joined(first: str, base: Mapping[str, str]) -> str:
    before = base.get("PYTHONPATH")
    return f"{first}{os.pathsep}{before}" if before else first


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a node.

    ``target`` is a node's name, ``rank<N>`` (the node that hosts it at that time), or None for add.
    ``at_s`` counts from the start of the run or, with a ``world_size`` in ranks, from the first
    step of a world of that size.
    """

    at_s: float
    action: str
    target: str | None
    world_size: int | None = None

    @property
    def target_rank(self) -> int | None:
        """The rank that the target names; None if it names a node."""
        if self.target is None or not self.target.startswith("rank"):
            return None
        return int(self.target.removeprefix("rank"))

    def __str__(self) -> str:
        target = f":{self.target}" if self.target else ""
        world = f"world{self.world_size}+" if self.world_size else ""
        return f"{self.action}{target}@{world}{self.at_s:g}s"


def read_event(text: str) -> Event:
    """Parse one ``--event``; raises ``ConfigError`` with one sentence."""
    match = _EVENT.fullmatch(text)
    if match is None:
        raise ConfigError(f"--event {text!r}: write ACTION:NODE@TIME, as in kill:node-1@15s")
    action, target = match["action"], match["target"]
    if action not in ACTIONS:
        raise ConfigError(f"--event {text!r}: no action {action!r}; there are {', '.join(ACTIONS)}")
    if target is None and action != "add":
        raise ConfigError(f"--event {text!r}: say which node, as in {action}:node-1@15s")
    if target is not None and not _TARGET.fullmatch(target):
        raise ConfigError(
            f"--event {text!r}: no node {target!r}; name it node-0, node-1, … or rank0"
        )
    if action == "add" and target is not None and not target.startswith("node"):
        raise ConfigError(f"--event {text!r}: a new node has no rank; name it node-0, node-1, …")
    world = _WORLD_TIME.fullmatch(match["time"])
    time = _TIME.fullmatch(match["time"] if world is None else world[2] or "0s")
    if time is None:
        raise ConfigError(
            f"--event {text!r}: no time {match['time']!r}; write a time as 15s, 2m or "
            "1h, or a time after a world's first step, as world3+5s"
        )
    at_s = float(time[1]) * _UNIT_S[time[2]]
    return Event(at_s, action, target, int(world[1]) if world else None)


def by_world(events: Iterable[Event]) -> list[list[Event]]:
    """Group the events that count from a world: consecutive ones of one size share one world."""
    counted = [event for event in events if event.world_size is not None]
    return [list(group) for _, group in groupby(counted, key=lambda event: event.world_size)]


@dataclass(frozen=True, slots=True)
class Reach:
    """The nodes and worlds that a run can have; its events must fit in.

    ``slots``: ranks per node. ``launcher``: a node of that name runs a central one.
    """

    nodes: int
    slots: int
    sizes: JobPolicy
    launcher: bool = False

    def faults(self, events: Sequence[Event]) -> Iterator[str]:
        """Yield a sentence for each event that can never fit."""
        for event in events:
            adds = [one for one in events if one.action == "add"]
            fault = self._world_fault(event, len(adds)) or self._target_fault(event, adds)
            if fault:
                yield f"--event {event}: {fault}"

    def _world_fault(self, event: Event, adds: int) -> str:
        if event.world_size is None:
            return ""
        none = f"no world of {event.world_size} ranks can form"
        most = min(self.nodes + adds, self.sizes.max_nodes)
        largest = self.sizes.largest(most) * self.slots
        if event.world_size > largest:
            return f"{none}: the largest has {largest}"
        if self.launcher:
            return ""  # a central launcher may leave slots of a node empty
        if event.world_size % self.slots:
            return f"{none}: a node has {self.slots}"
        size = event.world_size // self.slots
        if self.sizes.largest(size) != size:
            return f"{none}: the sizes are {self.sizes.sizes_in_words}"
        return ""

    def _target_fault(self, event: Event, adds: Sequence[Event]) -> str:
        if event.action == "add" or event.target is None:
            return ""
        if event.target == "launcher":
            return "" if self.launcher else "there is no launcher: torchrun runs on each node"
        if (rank := event.target_rank) is not None:
            most = min(self.nodes + len(adds), self.sizes.max_nodes)
            ranks = most * self.slots
            if rank < ranks:
                return ""
            each = counted(self.slots, "rank")
            have = f"{counted(most, 'node')} with {each} each: rank 0 to {ranks - 1}"
            return f"there is no rank {rank}; there are {have}"
        earlier = [add for add in adds if _may_precede(add, event)]
        if event.target in self._names(earlier):
            return ""
        early = " so early" if event.target in self._names(adds) else ""
        last = self.nodes + sum(add.target is None for add in earlier) - 1
        there = f"the nodes are node-0 to node-{last}" if last else "the only node is node-0"
        return f"there is no {event.target}{early}: {there}"

    def _names(self, adds: Sequence[Event]) -> set[str]:
        unnamed = sum(add.target is None for add in adds)
        names = {f"node-{index}" for index in range(self.nodes + unnamed)}
        return names | {add.target for add in adds if add.target is not None}


def _may_precede(one: Event, other: Event) -> bool:
    """Return whether ``one`` may happen before ``other``; by the clocks of worlds it always may."""
    if one.world_size is not None or other.world_size is not None:
        return True
    return one.at_s <= other.at_s
