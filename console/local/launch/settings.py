# SPDX-License-Identifier: Apache-2.0
"""The settings of a run, and the environments that follow from them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import console
from agent.config.job import StoreConfig
from agent.config.table import settings_of
from console.local.launch.horovod_line import HorovodLine
from console.local.launch.launch_line import LaunchLine
from console.local.processes.marked import NODE_MARK, RUN_MARK
from launcher_shim.pod.horovod_line import NEEDED
from launcher_shim.rundir import layout
from rdzv.store.access import Access

MAX_NODES = 64

LAUNCHER = "launcher"
"""The node that horovodrun runs on."""


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """The settings of one run of ``muster local``."""

    run: str
    """Random name of this run, which marks its processes."""
    namespace: str
    """Namespace of the job in the store."""
    job: str
    """Name of the job, also torch's run id."""
    line: LaunchLine | HorovodLine
    """The command of each node, or that of a horovodrun."""
    nodes: int
    """Number of nodes at the start of the run."""
    min_nodes: int
    """The fewest nodes that may train together. More: a world that lost one may have to wait for
    another."""
    max_nodes: int
    """The most nodes that may train together; those beyond stand by."""
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
    sizes: tuple[int, ...] = ()
    """Numbers of nodes that may train together; empty: any from the fewest to the most."""
    unit: int = 1
    """The number of nodes in a world is a multiple of this. More: more may have to stand by."""
    gather_s: float = 2.0
    """Time for which the first newcomer waits for others, in seconds. Longer: newcomers that come
    one after another cost one new world; shorter: a single one trains sooner."""
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
        "MUSTER_MIN": str(settings.min_nodes),
        "MUSTER_MAX": str(settings.max_nodes),
        "MUSTER_SIZES": ",".join(map(str, settings.sizes)),
        "MUSTER_UNIT": str(settings.unit),
        "MUSTER_GATHER": f"{settings.gather_s:g}s",
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


def horovodrun_environment(settings: LocalSettings, node: str, run_dir: Path) -> dict[str, str]:
    """Return the environment that horovodrun needs, and no more.

    It puts all its variables on the command lines of its workers, which have the rest from their
    own nodes.
    """
    kept = {name: value for name, value in os.environ.items() if NEEDED.match(name)}
    return kept | {
        RUN_MARK: settings.run,
        NODE_MARK: node,
        "MUSTER_RUN_DIR": str(run_dir),
        "PATH": f"{run_dir / layout.REMOTE_SHELL}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONUNBUFFERED": "1",
    }


def native_delivery(settings: LocalSettings, port: int, *, is_host: bool) -> dict[str, str]:
    """Return torchrun's settings without Muster: torch's c10d rendezvous, at its best settings."""
    return {
        "PET_NNODES": f"{settings.min_nodes}:{settings.max_nodes}",
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
