# SPDX-License-Identifier: Apache-2.0
"""The object that created a pod, as far as the pod shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_TEMPLATE_HASH = "pod-template-hash"
_JOBSET = "jobset.sigs.k8s.io/jobset-name"
_JOBSET_PART = "jobset.sigs.k8s.io/replicatedjob-name"
_RUNTIME_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
_GROUP = "leaderworkerset.sigs.k8s.io/name"
_KUBEFLOW_ROLE = "training.kubeflow.org/replica-type"
_MPI_VERSION = "kubeflow.org/v2beta1"
"""The version of MPIJob that belongs to mpi-operator, which makes launchers by a batch Job."""
_MPI_ROLE = "training.kubeflow.org/job-role"
_MPI_JOB = "training.kubeflow.org/job-name"
_OPERATOR = "training.kubeflow.org/operator-name"
_TASK = "volcano.sh/task-spec"


@dataclass(frozen=True, slots=True)
class Owner:
    """An object with a pod template, and the path of this pod's template in it.

    ``read``: the object to read from the API for the rest, if the pod does not show enough; it may
    another object, as a pod of a JobSet is created by a Job. None: the pod shows enough.
    ``obstacle``: why its pods are not injected. ``must_be_read``: the pod alone never shows enough.
    """

    api_version: str
    kind: str
    name: str
    path: str
    read: Reference | None = None
    obstacle: str | None = None
    must_be_read: bool = False

    @property
    def group(self) -> str:
        """The API group."""
        return self.api_version.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to an object of the API."""

    api_version: str
    kind: str
    name: str
    uid: str


def owner_of(pod: Mapping[str, Any]) -> Owner | None:
    """Return the object that the pods of one job share; None for a pod without a controller."""
    metadata = pod.get("metadata") or {}
    labels: Mapping[str, str] = metadata.get("labels") or {}
    references = metadata.get("ownerReferences") or []
    maker = next((one for one in references if one.get("controller")), None)
    if maker is None:
        return None
    made_by = Reference(maker["apiVersion"], maker["kind"], maker["name"], maker.get("uid", ""))
    match made_by.api_version.rpartition("/")[0], made_by.kind:
        case "apps", "ReplicaSet" if _TEMPLATE_HASH in labels:
            name = made_by.name.removesuffix("-" + labels[_TEMPLATE_HASH])
            return Owner(made_by.api_version, "Deployment", name, "spec.template")
        case "apps", "StatefulSet" if _GROUP in labels:
            path = "spec.leaderWorkerTemplate.workerTemplate"
            version = "leaderworkerset.x-k8s.io/v1"
            return Owner(version, "LeaderWorkerSet", labels[_GROUP], path)
        case "batch", "Job" if labels.get(_OPERATOR) == "mpi-operator":
            return _of_launcher(made_by, labels)
        case "batch", "Job":
            return _of_job(made_by, labels)
        case "batch.volcano.sh", "Job":
            path = f"spec.tasks.{labels.get(_TASK, 'worker')}.template"
            return Owner(made_by.api_version, "Job", made_by.name, path)
        case "kai.alibabacloud.com", "TrainingJob":
            # Its operator names launchers this way; the labels differ between releases.
            role = "launcher" if metadata.get("name", "").endswith("-launcher") else "worker"
            path = f"spec.etReplicaSpecs.{role}.template"
            return Owner(made_by.api_version, made_by.kind, made_by.name, path, made_by)
        case "kubeflow.org", "PyTorchJob":
            role = labels.get(_KUBEFLOW_ROLE, "worker").capitalize()
            path = f"spec.pytorchReplicaSpecs.{role}.template"
            return Owner(made_by.api_version, made_by.kind, made_by.name, path, made_by)
        case "kubeflow.org", "MPIJob":
            return _of_mpi(made_by, labels.get(_KUBEFLOW_ROLE) or labels.get(_MPI_ROLE))
        case "kubeflow.org", kind:
            why = (
                f"a {kind} of kubeflow.org does not train through Muster: it knows PyTorchJob and"
                " MPIJob"
            )
            return Owner(made_by.api_version, kind, made_by.name, "spec.template", obstacle=why)
    return Owner(made_by.api_version, made_by.kind, made_by.name, "spec.template")


def _of_mpi(job: Reference, role: str | None) -> Owner:
    path = f"spec.mpiReplicaSpecs.{(role or 'worker').capitalize()}.template"
    why = None
    if role not in ("launcher", "worker"):
        why = f"no label of a pod of MPIJob {job.name} says whether it is launcher or worker"
    must_be_read = job.api_version == _MPI_VERSION
    return Owner(job.api_version, job.kind, job.name, path, job, why, must_be_read)


def _of_launcher(job: Reference, labels: Mapping[str, str]) -> Owner:
    """Return the MPIJob of a launcher, whose batch Job has its name and ``-launcher``."""
    name = labels.get(_MPI_JOB, "")
    role = labels.get(_MPI_ROLE)
    owner = _of_mpi(Reference(_MPI_VERSION, "MPIJob", name, ""), role)
    why = f"its labels are of mpi-operator, and Job {job.name} is no launcher of mpi-operator's"
    is_launcher = role == "launcher" and job.name == f"{name}-launcher"
    return replace(owner, read=job, obstacle=None if is_launcher else why)


def maker_of(owner: Owner, read: Mapping[str, Any]) -> Reference | None:
    """Return the owner itself if ``read`` is the batch Job that it has made; None if it is not.

    The pod of a launcher has the UID of that Job alone, and the Job that of the MPIJob.
    """
    references = (read.get("metadata") or {}).get("ownerReferences") or []
    for one in references:
        maker = Reference(one["apiVersion"], one["kind"], one["name"], one.get("uid", ""))
        if one.get("controller") and (maker.kind, maker.name) == (owner.kind, owner.name):
            return maker
    return None


def _of_job(job: Reference, labels: Mapping[str, str]) -> Owner:
    if _JOBSET not in labels:
        return Owner(job.api_version, "Job", job.name, "spec.template", job)
    part = labels.get(_JOBSET_PART, "workers")
    if _RUNTIME_STEP in labels:
        path = "spec.template.spec.replicatedJobs.node.template.spec.template"
        version = "trainer.kubeflow.org/v1alpha1"
        return Owner(version, "TrainingRuntime", labels[_JOBSET], path, job)
    path = f"spec.replicatedJobs.{part}.template.spec.template"
    return Owner("jobset.x-k8s.io/v1alpha2", "JobSet", labels[_JOBSET], path, job)
