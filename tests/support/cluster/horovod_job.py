# SPDX-License-Identifier: Apache-2.0
"""An elastic MPIJob of the training-operator, as its example has it, with a real horovodrun."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kubelab import images
from kubelab.layout import PROGRAMS
from ruamel.yaml import YAML

from tests.support.cluster.lab import ROOT, TRAINER_IMAGE, Kubelab, Object, host_paths, python_paths
from tests.support.cluster.operator_job import OperatorJob
from tests.support.cluster.workload import Workload
from tests.support.horovod.cluster import horovod_folder
from tests.support.horovod.steps import Step, read_steps

EXAMPLE = ROOT / "examples" / "kubernetes" / "horovod" / "mpijob.yaml"
SCRIPT = ROOT / "tests" / "support" / "scripts" / "horovod_steps.py"
NAME = "mnist-elastic"
FORM_TIMEOUT_S = 240.0
DELIVERY_IMAGE = "docker.io/kubeflow/kubectl-delivery:latest"
"""What the operator's launcher begins with."""
_DELIVERY = r"""
#include <fcntl.h>
#include <stdlib.h>
#include <stdio.h>
#include <unistd.h>
int main(void) {
  char path[4096], part[65536];
  ssize_t read_bytes;
  snprintf(path, sizeof path, "%s/kubectl", getenv("TARGET_DIR"));
  int from = open("/kubectl", O_RDONLY), to = open(path, O_WRONLY | O_CREAT, 0755);
  if (from < 0 || to < 0) return 1;
  while ((read_bytes = read(from, part, sizeof part)) > 0)
    if (write(to, part, read_bytes) != read_bytes) return 1;
  return 0;
}
"""
RESTRICTED: Object = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def prepare(lab: Kubelab) -> None:
    """Load what the operator's launcher begins with, give nodes the storage that it asks for."""
    archive = images.directory() / "kubectl-delivery.tar"
    with tempfile.TemporaryDirectory() as folder:
        source, root = Path(folder) / "deliver.c", Path(folder) / "root"
        root.mkdir()
        source.write_text(_DELIVERY)
        subprocess.run(["gcc", "-static", "-o", root / "deliver", source], check=True)
        shutil.copy(PROGRAMS / "kubectl", root)
        images.pack_root(root, DELIVERY_IMAGE, archive, {"Entrypoint": ["/deliver"]})
    lab.command("load", str(archive), timeout_s=300)
    storage = {"ephemeral-storage": "40Gi"}
    status = json.dumps({"status": {"capacity": storage, "allocatable": storage}})
    for node in ("node-a", "node-b"):
        lab.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", status)


def launcher_pod(*, labelled: bool) -> Object:
    """The launcher as the operator makes it: with a container of its own before the user's."""
    line = (
        "horovodrun -np 2 --min-np 1 --max-np 3 --host-discovery-script /etc/mpi/discover_hosts.sh"
    )
    owner = {"apiVersion": "kubeflow.org/v1", "kind": "MPIJob", "controller": True}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{NAME}-launcher",
            "labels": {
                "training.kubeflow.org/replica-type": "launcher",
                **({"muster.dev/inject": "true"} if labelled else {}),
            },
            # There is no such MPIJob from which its workers could learn the size.
            "annotations": {"muster.dev/min": "1", "muster.dev/max": "3"},
            "ownerReferences": [{**owner, "name": NAME, "uid": str(uuid.uuid4())}],
        },
        "spec": {
            "initContainers": [{"name": "kubectl-delivery", "image": DELIVERY_IMAGE}],
            "containers": [
                {
                    "name": "launcher",
                    "image": TRAINER_IMAGE,
                    "command": [*line.split(), "python", "train.py"],
                    "securityContext": RESTRICTED,
                }
            ],
        },
    }


@dataclass(frozen=True)
class ElasticMPIJob(Workload):
    """The example, with what this lab has; as another user than root, and restricted."""

    most: int = 3
    least: int = 1
    starts_again: bool = False
    """Whether the launcher's container starts again where it fails, as without any worker."""

    taken_port: int = 0
    """A port that the workers' own container declares."""

    def manifest(self, directory: Path) -> Object:
        """The object; its pods write to ``directory``."""
        job: Object = YAML(typ="safe").load(EXAMPLE)
        folder = Path(horovod_folder())
        volumes, mounts = host_paths(
            *python_paths([sys.prefix, sys.base_prefix, str(folder.parent)]),
            (ROOT, False),
            (directory, True),
        )
        # Only root may pass through the image's own /root, and Python lies below.
        volumes, mounts = (
            [{"name": "root", "emptyDir": {}}, *volumes],
            [{"name": "root", "mountPath": "/root"}, *mounts],
        )
        variables = {
            "PATH": f"{folder}:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/tmp",
            "STEPS_DIR": str(directory / "applied"),
            "GATES_DIR": str(directory / "gates"),
            "OMP_NUM_THREADS": "1",
        }
        for role, cpu in (("Launcher", "100m"), ("Worker", self.cpu)):
            spec = job["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]
            (container,) = spec["containers"]
            spec |= {"volumes": volumes, "enableServiceLinks": False}
            spec["terminationGracePeriodSeconds"] = self.grace_s
            container |= {
                "image": TRAINER_IMAGE,
                "imagePullPolicy": "Never",
                "volumeMounts": mounts,
                "securityContext": RESTRICTED,
                "resources": {"requests": {"cpu": cpu, "memory": "300Mi"}},
                "env": [{"name": name, "value": value} for name, value in variables.items()],
            }
            if role == "Worker" and self.taken_port:
                container["ports"] = [{"containerPort": self.taken_port}]
            if role == "Launcher":
                if self.starts_again:
                    job["spec"]["mpiReplicaSpecs"][role]["restartPolicy"] = "OnFailure"
                spec["nodeSelector"] = {"kubernetes.io/hostname": "node-a"}
                line = container["command"]
                patience = ["--gloo-timeout-seconds", "120"]
                ends = line.index("python")
                container["command"] = [*line[:ends], *patience, "python", str(SCRIPT)]
        return job


class HorovodJob(OperatorJob):
    """Such a job in a namespace of its own, by ``muster inject``, or with the chart's label."""

    owner = ("mpijob", NAME)
    name = NAME

    def __init__(
        self, lab: Kubelab, directory: Path, workload: ElasticMPIJob, *, labelled: bool = False
    ) -> None:
        super().__init__(lab, directory, workload, muster=True)
        self._labelled = labelled
        for name in ("gates", "applied"):
            (self.directory / name).mkdir()
            (self.directory / name).chmod(0o777)

    def _apply_before(self) -> None:
        for name, value in (("preserved-pc", 1000), ("preemptible-pc", 10)):
            priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass"}
            self.lab.apply("default", {**priority, "metadata": {"name": name}, "value": value})
        if not self._labelled:
            super()._apply_before()

    def injected(self, manifest: str, *arguments: str) -> str:
        """The label alone: min and max are in the launcher's command, and the chart has a store."""
        if not self._labelled:
            return super().injected(manifest, *arguments)
        made: Object = json.loads(manifest)
        for replicas in made["spec"]["mpiReplicaSpecs"].values():
            metadata = replicas["template"].setdefault("metadata", {})
            metadata["labels"] = {**metadata.get("labels", {}), "muster.dev/inject": "true"}
        return json.dumps(made)

    def applied(self) -> list[Step]:
        """Every step that a worker has told of, in the order of time."""
        return read_steps(self.directory / "applied")

    def workers(self) -> list[Step]:
        """The newest step of each worker that makes steps now, by rank."""
        now_s = time.monotonic()
        newest = {one.host: one for one in self.applied() if now_s - one.at_s < 3.0}
        return sorted(newest.values(), key=lambda one: one.rank)

    def trains_with(self, workers: int, *, other_than: Sequence[Step] = ()) -> list[Step]:
        """Wait until so many workers, others than before, make steps together."""
        before = {one.host for one in other_than}
        found: list[list[Step]] = []

        def there() -> bool:
            found.append(self.workers())
            hosts = {one.host for one in found[-1]}
            sizes = {one.size for one in found[-1]}
            return sizes == {workers} and len(hosts) == workers and hosts != before

        self.until(there, FORM_TIMEOUT_S, f"{workers} workers train")
        return found[-1]

    def edit_replicas(self, replicas: int) -> None:
        """What stands in for the scale of an MPIJob."""
        self.tell(f"Worker.replicas is {replicas}")
        spec = {"spec": {"mpiReplicaSpecs": {"Worker": {"replicas": replicas}}}}
        self.kubectl("patch", *self.owner, "--type=merge", "-p", json.dumps(spec))

    def nothing_is_lost(self) -> None:
        """Assert that each step was applied once: it adds 1 to the one weight."""
        applied = self.applied()
        assert all(one.weight == one.number for one in applied)
        steps = {one.number for one in applied}
        assert steps == set(range(1, max(steps) + 1))
        for host in {one.host for one in applied}:
            made = [one.number for one in applied if one.host == host]
            assert made == sorted(set(made)), f"{host} has made a step again"
