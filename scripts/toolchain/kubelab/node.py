# SPDX-License-Identifier: Apache-2.0
"""One node: a containerd and a kubelet in a mount namespace of their own.

That namespace hides the version 2 cgroup mount, which would confuse the runtime, and replaces the
folders that both programs insist on by the node's own, so that nothing of them stays behind.
"""

from __future__ import annotations

import json
import time

from kubelab import cgroups, network
from kubelab.control_plane import KUBELET_CLIENT
from kubelab.errors import LabError
from kubelab.layout import (
    BRIDGE,
    CLUSTER_DOMAIN,
    HOST_ADDRESS,
    KUBECONFIG,
    PAUSE_IMAGE,
    PROGRAMS,
    SUBNET,
    NodeLayout,
)
from kubelab.needs import CNI_PLUGINS
from kubelab.processes import check, last_lines, pid_of, start, stop

PRIVATE = ("/run/containerd", "/var/lib/cni", "/var/lib/kubelet", "/var/log/containers")
"""Folders that containerd, CNI or kubelet use regardless of their configuration."""

_ENTER = """
set -e
mount --make-rprivate /
if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi
for folder in $FOLDERS; do mount --bind "$NODE/private$folder" "$folder"; done
exec containerd --config "$NODE/containerd.toml"
"""


def start_runtime(node: NodeLayout) -> None:
    """Start containerd and wait until it answers."""
    for folder in PRIVATE:
        (node.directory / "private" / folder[1:]).mkdir(parents=True, exist_ok=True)
    _write_cni(node)
    (node.directory / "containerd.toml").write_text(_containerd_config(node))
    start(
        f"containerd-{node.name}",
        ["unshare", "-m", "sh", "-c", _ENTER],
        {"FOLDERS": " ".join(PRIVATE), "NODE": str(node.directory)},
    )
    deadline_s = time.monotonic() + 60
    while True:
        try:
            check(["ctr", "-a", str(node.containerd_socket), "version"])
            return
        except LabError as error:
            if time.monotonic() > deadline_s or pid_of(f"containerd-{node.name}") is None:
                raise LabError(
                    f"containerd of {node.name} does not answer ({error}); its last lines:\n"
                    f"{last_lines(f'containerd-{node.name}')}"
                ) from error
            time.sleep(0.1)


def start_kubelet(node: NodeLayout) -> None:
    """Start the kubelet in the mount namespace of the node's containerd."""
    runtime = pid_of(f"containerd-{node.name}")
    if runtime is None:
        raise LabError(f"containerd of {node.name} has ended")
    config = node.directory / "kubelet.json"
    config.write_text(json.dumps(_kubelet_config(node), indent=2))
    start(
        f"kubelet-{node.name}",
        [
            *("nsenter", "-m", "-t", str(runtime), "--", str(PROGRAMS / "kubelet")),
            f"--config={config}",
            f"--kubeconfig={KUBECONFIG}",
            "--root-dir=/var/lib/kubelet",
            f"--hostname-override={node.name}",
            f"--node-ip={node.address}",
            "--v=2",
        ],
    )


def stop_kubelet(node: NodeLayout) -> None:
    """Stop the kubelet; containers run on."""
    stop(f"kubelet-{node.name}")


def lose(node: NodeLayout) -> None:
    """Simulate the loss of a machine: its network first, then the kubelet and all containers."""
    network.unplug(cgroups.pids_in(node.cgroup))
    stop(f"kubelet-{node.name}", timeout_s=0.0)
    cgroups.kill_all(node.cgroup)


def stop_all(node: NodeLayout) -> None:
    """Stop the kubelet, every container, and containerd."""
    stop(f"kubelet-{node.name}", timeout_s=1.0)
    cgroups.kill_all(node.cgroup)
    stop(f"containerd-{node.name}", timeout_s=3.0)


def _write_cni(node: NodeLayout) -> None:
    directory = node.directory / "cni"
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "cniVersion": "0.4.0",
        "name": "kubelab",
        "plugins": [
            {
                "type": "bridge",
                "bridge": BRIDGE,
                "isGateway": False,
                "ipMasq": False,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "dataDir": str(node.directory / "addresses"),
                    "ranges": [
                        [
                            {
                                "subnet": SUBNET,
                                "rangeStart": node.first_pod,
                                "rangeEnd": node.last_pod,
                                "gateway": HOST_ADDRESS,
                            }
                        ]
                    ],
                },
            }
        ],
    }
    (directory / "10-kubelab.conflist").write_text(json.dumps(config, indent=2))


def _containerd_config(node: NodeLayout) -> str:
    return f"""\
version = 2
root = "{node.directory}/containerd"
state = "/run/containerd/state"
oom_score = 0
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs"]

[grpc]
  address = "{node.containerd_socket}"

[plugins."io.containerd.internal.v1.opt"]
  path = "{node.directory}/opt"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{node.directory}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""


def _kubelet_config(node: NodeLayout) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": f"{KUBELET_CLIENT}.crt"},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.cgroup}",
        "clusterDNS": [HOST_ADDRESS],
        "clusterDomain": CLUSTER_DOMAIN,
        "containerRuntimeEndpoint": f"unix://{node.containerd_socket}",
        "enforceNodeAllocatable": [],
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%"},
        "failCgroupV1": False,
        "failSwapOn": False,
        "healthzPort": 0,
        # Never collect images: a deleted one could not be pulled again.
        "imageGCHighThresholdPercent": 100,
        "localStorageCapacityIsolation": False,
        "makeIPTablesUtilChains": False,
        "nodeStatusUpdateFrequency": "4s",
        "podLogsDir": str(node.directory / "pod-logs"),
        "registerNode": True,
        "resolvConf": "",
        # Both nodes use images that are loaded; nothing is ever pulled.
        "serializeImagePulls": False,
        # Bounds the delay of a mounted Secret's update; the default of a minute is long for a test.
        "syncFrequency": "10s",
    }
