# SPDX-License-Identifier: Apache-2.0
"""What a user would write: a training job as a Deployment, StatefulSet or Indexed Job, and an etcd.

The same YAML runs without Muster, on torch's own c10d rendezvous at the pod with index 0, and with
it, once ``muster inject`` has added the sidecar.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ruamel.yaml import YAML

from tests.support.cluster.lab import (
    ETCD_IMAGE,
    ROOT,
    TRAINER_IMAGE,
    Object,
    host_paths,
    python_paths,
)

Kind = Literal["Deployment", "StatefulSet", "Job"]
NAME = "trainer"
LABEL = f"app={NAME}"
ETCD_ENDPOINT = "http://etcd:2379"
GRACE_S = 180
"""Longer than any drain takes, however busy the machine is."""
ETCD = ROOT / "examples" / "kubernetes" / "quickstart" / "etcd.yaml"
SCRIPT = ROOT / "tests" / "support" / "scripts" / "drain_loop.py"

_NO_FAILURES: list[Object] = [
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
    {
        "action": "Ignore",
        "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [143]},
    },
]
"""What docs/kubernetes.md has a Job ignore: pods that were evicted, preempted, or drained."""


@dataclass(frozen=True)
class Workload:
    """A training job. Seconds where the name ends with ``_s``."""

    kind: Kind = "StatefulSet"
    replicas: int = 3
    least: int = 2
    most: int = 4
    slots: int = 1
    """Processes in each pod."""
    grace_s: int = 30
    shell: bool = False
    """Whether the command is given to ``sh -c``, as in most examples."""
    line: str = ""
    """What ``bash -c`` runs instead, with TORCHRUN, SLOTS and SCRIPT in it."""
    step_s: float = 0.05
    save_s: float = 0.2
    every: int = 100
    """Steps between periodic checkpoints, which jobs without Muster live on."""
    prints: int = 0
    """Steps between two lines that each rank prints; 0: it prints none."""
    min_ready_s: int = 0
    """How long a new pod of a Deployment or StatefulSet is to be ready before it counts."""
    cpu: str = "50m"
    unreachable_s: int = 300
    """How long pods outlive a node that is lost, or too busy to say that it is not."""
    lease_ttl: str = ""
    """The sidecar's ``MUSTER_LEASE_TTL``, written there by hand; empty: Muster's own."""

    def manifest(self, directory: Path) -> Object:
        """The object as a user would write it; its pods write to ``directory``."""
        template = {"metadata": {"labels": {"app": NAME}}, "spec": self._pod(directory)}
        labels = {"matchLabels": {"app": NAME}}
        metadata = {"name": NAME}
        if self.kind == "Job":
            spec: Object = {
                "completions": self.replicas,
                "parallelism": self.replicas,
                "completionMode": "Indexed",
                "backoffLimitPerIndex": 10,
                "maxFailedIndexes": 1,
                "podFailurePolicy": {"rules": _NO_FAILURES},
                "template": template,
            }
            template["spec"]["restartPolicy"] = "Never"
            return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
        spec = {"replicas": self.replicas, "selector": labels, "template": template}
        if self.min_ready_s:
            spec["minReadySeconds"] = self.min_ready_s
        if self.kind == "StatefulSet":
            spec |= {"serviceName": NAME, "podManagementPolicy": "Parallel"}
        return {"apiVersion": "apps/v1", "kind": self.kind, "metadata": metadata, "spec": spec}

    def _pod(self, directory: Path) -> Object:
        torchrun = f"{sys.prefix}/bin/torchrun"
        command = [torchrun, f"--nproc-per-node={self.slots}", str(SCRIPT)]
        if self.shell:
            command = ["sh", "-c", shlex.join(command)]
        if self.line:
            line = self.line.replace("TORCHRUN", torchrun).replace("SLOTS", str(self.slots))
            command = ["bash", "-c", line.replace("SCRIPT", str(SCRIPT))]
        volumes, mounts = host_paths(
            *python_paths([sys.prefix, sys.base_prefix]), (ROOT, False), (directory, True)
        )
        unreachable = [
            {
                "key": f"node.kubernetes.io/{reason}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": self.unreachable_s,
            }
            for reason in ("unreachable", "not-ready")
        ]
        container = {
            "name": "trainer",
            "image": TRAINER_IMAGE,
            "imagePullPolicy": "Never",
            "command": command,
            "env": self._environ(directory),
            "resources": {"requests": {"cpu": self.cpu, "memory": "300Mi"}},
            "volumeMounts": mounts,
        }
        return {
            "terminationGracePeriodSeconds": self.grace_s,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "tolerations": unreachable,
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": {"app": NAME}},
                }
            ],
            "containers": [container],
            "volumes": volumes,
        }

    def _environ(self, directory: Path) -> list[Object]:
        values = {
            # torchrun's own, for a job without Muster; what a sidecar delivers wins over it.
            "PET_NNODES": f"{self.least}:{self.most}",
            "PET_RDZV_BACKEND": "c10d",
            # In full, as /etc/hosts of that pod has it: torchrun asks whether it is the host, maybe
            # before the DNS knows it, and else waits for itself for a minute.
            "PET_RDZV_ENDPOINT": f"{NAME}-0.{NAME}.$(NAMESPACE).svc.cluster.local:29400",
            "PET_RDZV_ID": NAME,
            "PET_MAX_RESTARTS": "10",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "STEP_LOOP_DIR": str(directory / "steps"),
            "STEP_LOOP_STOP": str(directory / "stop"),
            "CHECKPOINT_DIR": str(directory / "checkpoints"),
            "DRAIN_LOOP_STEP_S": str(self.step_s),
            "DRAIN_LOOP_SAVE_S": str(self.save_s),
            "DRAIN_LOOP_EVERY": str(self.every),
            "DRAIN_LOOP_PRINT": str(self.prints),
        }
        told = {"STEP_LOOP_NODE": "metadata.name", "NAMESPACE": "metadata.namespace"}
        return [
            *(
                {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
                for name, path in told.items()
            ),
            *({"name": name, "value": value} for name, value in values.items()),
        ]

    @property
    def enough_s(self) -> float:
        """The grace that lets everybody save: reserve, two steps, the save, a second."""
        reserve_s = max(1.0, min(5.0, self.grace_s / 3))
        return reserve_s + 2 * self.step_s + self.save_s + 1.0


def headless_service(name: str, port: int) -> Object:
    """The names of pods, of those that are not ready, too."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app": name},
            "ports": [{"port": port}],
        },
    }


def etcd(data: Path) -> tuple[Object, Object]:
    """The quick start's, with the lab's image, on node-a; its data outlive its pod."""
    service, member = YAML(typ="safe").load_all(ETCD)
    del member["spec"]["volumeClaimTemplates"]
    pod = member["spec"]["template"]["spec"]
    pod["nodeSelector"] = {"kubernetes.io/hostname": "node-a"}
    pod["volumes"] = [{"name": "data", "hostPath": {"path": str(data), "type": "Directory"}}]
    (container,) = pod["containers"]
    container["image"] = ETCD_IMAGE
    # Drills end its process, which takes nothing from the disk; their pods need all the cores.
    container["command"].append("--unsafe-no-fsync")
    del container["resources"]
    return service, member
