# SPDX-License-Identifier: Apache-2.0
"""What a run is to do, and the environments that follow from it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import console
from console.local.launch_line import LaunchLine
from console.local.processes import NODE_MARK, RUN_MARK

MAX_NODES = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """One run of ``muster local``. ``endpoints`` is None for an embedded store.

    ``checkpoints`` is a directory that all nodes share, as a cluster's volume would be.
    ``native`` leaves Muster out: the first node's torchrun holds torch's own store.
    """

    run: str
    namespace: str
    job: str
    line: LaunchLine
    nodes: int
    min_nodes: int
    max_nodes: int
    restarts: int
    lease_ttl_s: float
    checkpoints: Path
    endpoints: str | None
    native: bool


def sidecar_command() -> tuple[str, ...]:
    """The sidecar, run by the interpreter that runs this."""
    return (sys.executable, "-m", "console.main", "agent")


def own_environment(base: Mapping[str, str]) -> dict[str, str]:
    """An environment in which that interpreter finds these packages, wherever it is started."""
    return {**base, "PYTHONPATH": _joined(str(Path(console.__file__).parent.parent), base)}


def sidecar_environment(
    settings: Settings, node: str, run_dir: Path, endpoints: str, c10d_port: int, http_port: int
) -> dict[str, str]:
    """What a pod's specification would give the sidecar."""
    return own_environment(os.environ) | {
        RUN_MARK: settings.run,
        NODE_MARK: node,
        "MUSTER_NAMESPACE": settings.namespace,
        "MUSTER_JOB": settings.job,
        "MUSTER_ADDRESS": "127.0.0.1",
        "MUSTER_NODE": node,
        "MUSTER_ROLE": "worker",
        "MUSTER_SLOTS": str(settings.line.slots),
        "MUSTER_MIN": str(settings.min_nodes),
        "MUSTER_MAX": str(settings.max_nodes),
        "MUSTER_ETCD_ENDPOINTS": endpoints,
        "MUSTER_RUN_DIR": str(run_dir),
        "MUSTER_C10D_PORT": str(c10d_port),
        "MUSTER_HTTP_PORT": str(http_port),
        "MUSTER_LEASE_TTL": f"{settings.lease_ttl_s:g}",
    }


def launcher_environment(
    settings: Settings, node: str, run_dir: Path, delivered: Mapping[str, str]
) -> dict[str, str]:
    """What the training container sees; ``delivered`` are the sidecar's own words to torchrun."""
    base = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "CHECKPOINT_DIR": str(settings.checkpoints),
        **os.environ,
        RUN_MARK: settings.run,
        NODE_MARK: node,
        "MUSTER_RUN_DIR": str(run_dir),
    }
    return {**base, **delivered, "PYTHONPATH": _joined(str(run_dir / "python"), base)}


def native_delivery(settings: Settings, port: int, *, is_host: bool) -> dict[str, str]:
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
