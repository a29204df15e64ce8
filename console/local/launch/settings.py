# SPDX-License-Identifier: Apache-2.0
"""What a run is to do, and the environments that follow from it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import console
from agent.config.sidecar import StoreConfig
from agent.config.table import settings_of
from console import grpc_log
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
    """One run of ``muster local``."""

    run: str
    """Random name of this run, which marks its processes."""
    namespace: str
    """Namespace of the job in the store."""
    job: str
    """Name of the job, also torch's run id."""
    line: LaunchLine | HorovodLine
    """The command of each node, or that of a horovodrun."""
    nodes: int
    """How many nodes the run begins with."""
    min_nodes: int
    """The fewest nodes that may train together. More: a world that lost one may have to wait for
    another."""
    max_nodes: int
    """The most nodes that may train together; those beyond stand by."""
    restarts: int
    """How often a torchrun that failed is started again. More: a script that always fails ends
    later."""
    lease_ttl_s: float
    """TTL of each member's lease, in seconds. Shorter: a node that was killed is evicted sooner,
    and so is one on a busy machine that is merely late."""
    checkpoints: Path
    """A directory that all nodes share, as a cluster's volume would be."""
    access: Access | None
    """How to reach the store; None for an embedded one."""
    native: bool
    """Leave Muster out, for comparison: the first node's torchrun holds torch's own store."""
    grace_s: float = 30.0
    """From SIGTERM to SIGKILL of a node that is deleted, in seconds. Longer: a slow save ends in
    time; shorter: a script that ignores SIGTERM is gone sooner."""
    sizes: tuple[int, ...] = ()
    """Numbers of nodes that may train together; empty: any from the fewest to the most."""
    unit: int = 1
    """Train with a multiple of so many nodes. More: more of them may have to stand by."""
    gather_s: float = 2.0
    """How long the first newcomer waits for others, in seconds. Longer: newcomers that come one
    after another cost one new world; shorter: a single one trains sooner."""
    keep_going: bool = False
    """Go on where the same error ends every round. Without it a script that always fails ends the
    run soon."""
    strict: bool = False
    """Fail a run in which an event did nothing."""


def sidecar_command() -> tuple[str, ...]:
    """The sidecar, run by the interpreter that runs this."""
    return (sys.executable, "-P", "-m", "console.main", "agent")


def own_environment(base: Mapping[str, str]) -> dict[str, str]:
    """An environment in which that interpreter finds these packages, wherever it is started."""
    return {**base, "PYTHONPATH": _joined(str(Path(console.__file__).parent.parent), base)}


@dataclass(frozen=True, slots=True)
class Pod:
    """What tells one node's sidecar from the others'."""

    name: str
    uid: str
    role: Literal["worker", "launcher"]
    run_dir: Path
    c10d_port: int
    http_port: int
    tunnel_port: int = 0


def sidecar_environment(settings: LocalSettings, pod: Pod, endpoints: str) -> dict[str, str]:
    """What a pod's specification would give the sidecar."""
    base = dict(os.environ)
    if settings.access is None:
        # The store of this run asks for none of what the user's own one may ask for.
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
    }


def launcher_environment(
    settings: LocalSettings, node: str, run_dir: Path, delivered: Mapping[str, str]
) -> dict[str, str]:
    """What the training container sees; ``delivered`` are the sidecar's own words to torchrun."""
    base = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **grpc_log.without(os.environ),
        "CHECKPOINT_DIR": str(settings.checkpoints),
        RUN_MARK: settings.run,
        NODE_MARK: node,
        "MUSTER_RUN_DIR": str(run_dir),
    }
    return {**base, **delivered, "PYTHONPATH": _joined(str(run_dir / layout.MODULES), base)}


def horovodrun_environment(settings: LocalSettings, node: str, run_dir: Path) -> dict[str, str]:
    """What horovodrun needs, and no more: it puts all it has on the command lines of its workers.

    They have the rest from their own nodes.
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
    """The words to torchrun without Muster: torch's own c10d rendezvous, on its best settings."""
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
    """Read the sidecar's ``env`` file: one ``KEY=VALUE`` a line."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def _joined(first: str, base: Mapping[str, str]) -> str:
    before = base.get("PYTHONPATH")
    return f"{first}{os.pathsep}{before}" if before else first
