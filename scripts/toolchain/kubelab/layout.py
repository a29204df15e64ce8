# SPDX-License-Identifier: Apache-2.0
"""The lab's paths, addresses and names: one lab per machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

STATE = Path("/var/lib/muster-kubelab")
"""All state of a running lab; removed when it is down."""

LOCK = Path("/run/lock/muster-kubelab.lock")
"""The machine's lock file; it stays, as a process that removes it might remove another's."""
MADE_BY_TESTS = STATE.with_name("muster-kubelab-made-by-tests")
"""The mark of a lab that tests may remove; outside of its state, to precede and outlive it."""

FOR_TESTS = "KUBELAB_FOR_TESTS"
"""The environment variable of commands that tests run."""

KUBECONFIG = STATE / "kubeconfig"
LOGS = STATE / "logs"
PIDS = STATE / "pids"
PROGRAMS = STATE / "programs"
"""A link to the folder of the programs that the lab runs."""

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP = "muster-kubelab"
BRIDGE = "muster-lab"
HOST_ADDRESS = "10.213.0.1"
"""The machine's address on the lab's bridge: only here the API server and CoreDNS listen."""

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
        """The folder with all state of this node."""
        return STATE / self.name

    @property
    def containerd_socket(self) -> Path:
        """The socket that its containerd listens on."""
        return self.directory / "containerd.sock"

    @property
    def cgroup(self) -> str:
        """The cgroup of its pods, relative to each hierarchy's root."""
        return f"{CGROUP}/{self.name}"


NODES = (
    NodeLayout("node-a", "10.213.255.1", "10.213.1.1", "10.213.1.254"),
    NodeLayout("node-b", "10.213.255.2", "10.213.2.1", "10.213.2.254"),
)


def cache() -> Path:
    """Return the folder that outlives the lab, with programs and images.

    It is ``MUSTER_CACHE``, as for all of scripts/.
    """
    if named := os.environ.get("MUSTER_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "muster"
