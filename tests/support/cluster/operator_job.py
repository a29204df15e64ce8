# SPDX-License-Identifier: Apache-2.0
"""An elastic PyTorchJob of Kubeflow's training-operator: as a user writes it, and injected."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML

from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import ROOT, Object
from tests.support.cluster.workload import NAME, Workload
from tests.support.training.step_log import World

EXAMPLE = ROOT / "examples" / "kubernetes" / "pytorchjob.yaml"
WORKER_0 = f"{NAME}-worker-0"
"""Also where the operator points every torchrun for its rendezvous."""


@dataclass(frozen=True)
class ElasticPyTorchJob(Workload):
    """What ``elasticPolicy`` says of the job, the operator gives to torchrun by environment."""

    def manifest(self, directory: Path) -> Object:
        """The example in the documentation, with what this lab has; its pods write there."""
        spec = self._pod(directory)
        (container,) = spec["containers"]
        job: Object = YAML(typ="safe").load(EXAMPLE)
        worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
        (written,) = worker["template"]["spec"]["containers"]
        # The operator knows its container by the name, and gives it what it has no PET_* for.
        container["name"] = written["name"]
        container["env"] = [
            variable for variable in container["env"] if not variable["name"].startswith("PET_")
        ]
        job["metadata"]["name"] = NAME
        job["spec"]["elasticPolicy"] |= {
            "minReplicas": self.least,
            "maxReplicas": self.most,
            "maxRestarts": 10,
        }
        worker["replicas"] = self.replicas
        worker["template"] = {"metadata": {"labels": {"app": NAME}}, "spec": spec}
        return job


class OperatorJob(KubeJob):
    """Such a job in a namespace of its own; or one of another ``owner`` that the operator knows."""

    owner = ("pytorchjob", NAME)

    def __exit__(self, *error: object) -> None:
        # Else the operator would make its pods again while they are removed.
        try:
            self.kubectl("delete", *self.owner, "--wait=false", timeout_s=180)
        finally:
            super().__exit__(*error)

    def scale(self, replicas: int) -> None:
        """``kubectl scale``."""
        self.tell(f"scaled to {replicas}")
        self.kubectl("scale", *self.owner, f"--replicas={replicas}")

    def conditions(self) -> dict[str, str]:
        """What the operator says of the job: status by type."""
        found = self.lab.get(self.namespace, *self.owner)["status"].get("conditions", [])
        return {condition["type"]: condition["status"] for condition in found}


def delete_worker_0(job: KubeJob, world: World) -> World:
    """``kubectl delete pod`` of the one that everybody meets at; the operator makes it again."""
    uids = {pod["metadata"]["uid"] for pod in job.pods()}
    job.tell(f"kubectl delete pod {WORKER_0}")
    job.kubectl("delete", "pod", WORKER_0, "--wait=false")
    job.until(
        lambda: WORKER_0 in job.names() and uids != {p["metadata"]["uid"] for p in job.pods()},
        150,
        f"{WORKER_0} is there again",
    )
    return job.world_of(len(world.nodes), 150, not_=world)
