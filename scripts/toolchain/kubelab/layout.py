# SPDX-License-Identifier: Apache-2.0
"""Where the lab keeps what, and which addresses and names it uses: one lab a machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

STATE = Path("/var/lib/muster-kubelab")
"""Everything of a running lab; gone when it is down."""

LOCK = Path("/run/lock/muster-kubelab.lock")
"""Of the machine, as the lab is; it stays, for whoever removed it might remove another's."""
MADE_BY_TESTS = STATE.with_name("muster-kubelab-made-by-tests")
"""The mark of a lab that tests may end; beside it, to be there before it and be gone after it."""

FOR_TESTS = "KUBELAB_FOR_TESTS"
"""In the environment of a command that tests give."""

KUBECONFIG = STATE / "kubeconfig"
LOGS = STATE / "logs"
PIDS = STATE / "pids"
PROGRAMS = STATE / "programs"
"""A link to the folder of the programs that the lab runs."""

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP = "muster-kubelab"
BRIDGE = "muster-lab"
HOST_ADDRESS = "10.213.0.1"
"""Of the machine, on the lab's bridge: the API server and CoreDNS listen here and nowhere else."""

SUBNET = "10.213.0.0/16"
SERVICE_SUBNET = "10.96.0.0/16"
CLUSTER_DOMAIN = "cluster.local"
ETCD_URL = "http://127.88.0.1:2379"
ETCD_PEER_URL = "http://127.88.0.1:2380"
API_URL = f"https://{HOST_ADDRESS}:6443"

PAUSE_IMAGE = "registry.k8s.io/pause:3.10"
TRAINER_IMAGE = "kubelab/trainer:bookworm"
ETCD_IMAGE = "kubelab/etcd:3.6.16"
OPERATOR_IMAGE = "kubelab/training-operator:1.8.1"


@dataclass(frozen=True)
class NodeLayout:
    """One node: an address on the bridge, a range of pod addresses, a folder."""

    name: str
    address: str
    first_pod: str
    last_pod: str

    @property
    def directory(self) -> Path:
        """Everything of this node."""
        return STATE / self.name

    @property
    def containerd_socket(self) -> Path:
        """Where its containerd listens."""
        return self.directory / "containerd.sock"

    @property
    def cgroup(self) -> str:
        """What its pods live in, below each hierarchy's root."""
        return f"{CGROUP}/{self.name}"


NODES = (
    NodeLayout("node-a", "10.213.255.1", "10.213.1.1", "10.213.1.254"),
    NodeLayout("node-b", "10.213.255.2", "10.213.2.1", "10.213.2.254"),
)


def cache() -> Path:
    """What survives the lab: programs and images. ``MUSTER_CACHE``, as for all of scripts/."""
    if named := os.environ.get("MUSTER_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "muster"
