# SPDX-License-Identifier: Apache-2.0
"""The known kinds of objects: the places of their pod templates, and what they state of a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ruamel.yaml.nodes import MappingNode, Node

from injection.yaml_tree import child, items, keys, text_of, value_of

Role = Literal["worker", "launcher"]
Place = tuple[int, str]
"""The place of a pod template in a text: the number of its object there, and the path within it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object: the paths to its pod templates, and to its statements on the job.

    In a path ``*`` is every entry or item, and another word is a key, or the name of an item.
    ``launcher``: the launcher's template, which has no slots. ``master``: the template whose
    end ends the whole job. The labels are those of its pods that hold the name and the UID of
    an object that lives as long as the job does, and the number of the pod (an empty variable
    if this object gives none). ``name_label``: the one that holds its own name, which is
    generated if it has only a ``generateName``. ``tells_torch``: the program that puts
    ``PET_*`` variables behind those of the template, where they win. ``replaced_once_gone``: a
    new pod has the name or the place of the old one, and is created after that is gone; with
    ``of_jobs`` the batch Job decides this. ``job_restarts``: how often the object makes a Job
    again that has failed. ``endless``: its containers are restarted however they end.
    ``horovod``: its pods are those of a horovodrun; ``run``: whether this was ever run with its
    operator. ``lasting``: the entry that the worker's replica spec needs so that a worker's end
    does not end the job. ``sshd``: an MPI program in its launcher reaches the workers by the
    sshd in whose place muster-exec runs.
    """

    templates: tuple[str, ...]
    launcher: str | None = None
    master: str | None = None
    least: str | None = None
    most: str | None = None
    slots: tuple[str, ...] = ()
    main_container: str | None = None
    job_name_label: str | None = None
    name_label: str | None = None
    job_uid_label: str | None = None
    index_label: str | None = None
    tells_torch: str | None = None
    replaced_once_gone: bool = False
    of_jobs: bool = False
    job_restarts: str | None = None
    endless: bool = False
    horovod: bool = False
    run: bool = True
    lasting: tuple[str, str] | None = None
    sshd: bool = False


_PLAIN = Kind(("spec.template",), endless=True)
_JOB_UID = "batch.kubernetes.io/controller-uid"
_JOB_NAME = "batch.kubernetes.io/job-name"
_JOB_INDEX = "batch.kubernetes.io/job-completion-index"
_JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
"""The name of the JobSet, which is also that of the TrainJob that it belongs to."""
_KUBEFLOW_NAME = "training.kubeflow.org/job-name"
_KUBEFLOW_INDEX = "training.kubeflow.org/replica-index"

KINDS: Mapping[tuple[str, str], Kind] = {
    ("", "Pod"): Kind(("",)),
    ("", "PodTemplate"): Kind(("template",)),
    ("", "ReplicationController"): _PLAIN,
    ("apps", "Deployment"): _PLAIN,
    ("apps", "StatefulSet"): Kind(
        ("spec.template",),
        index_label="apps.kubernetes.io/pod-index",
        replaced_once_gone=True,
        endless=True,
    ),
    ("apps", "ReplicaSet"): _PLAIN,
    ("apps", "DaemonSet"): Kind(("spec.template",), replaced_once_gone=True, endless=True),
    ("batch", "Job"): Kind(
        ("spec.template",),
        name_label=_JOB_NAME,
        job_uid_label=_JOB_UID,
        index_label=_JOB_INDEX,
        of_jobs=True,
    ),
    ("batch", "CronJob"): Kind(
        ("spec.jobTemplate.spec.template",),
        job_name_label=_JOB_NAME,
        job_uid_label=_JOB_UID,
        index_label=_JOB_INDEX,
        of_jobs=True,
    ),
    ("kubeflow.org", "PyTorchJob"): Kind(
        ("spec.pytorchReplicaSpecs.*.template",),
        master="spec.pytorchReplicaSpecs.Master.template",
        least="spec.elasticPolicy.minReplicas",
        most="spec.elasticPolicy.maxReplicas",
        slots=("spec.elasticPolicy.nProcPerNode", "spec.nprocPerNode"),
        main_container="pytorch",
        name_label=_KUBEFLOW_NAME,
        index_label=_KUBEFLOW_INDEX,
        tells_torch="the training-operator",
        replaced_once_gone=True,
    ),
    ("kubeflow.org", "MPIJob"): Kind(
        ("spec.mpiReplicaSpecs.Worker.template",),
        launcher="spec.mpiReplicaSpecs.Launcher.template",
        slots=("spec.slotsPerWorker",),
        name_label=_KUBEFLOW_NAME,
        index_label=_KUBEFLOW_INDEX,
        replaced_once_gone=True,
        horovod=True,
        lasting=("restartPolicy", "ExitCode"),
    ),
    ("kai.alibabacloud.com", "TrainingJob"): Kind(
        ("spec.etReplicaSpecs.worker.template",),
        launcher="spec.etReplicaSpecs.launcher.template",
        least="spec.etReplicaSpecs.worker.minReplicas",
        most="spec.etReplicaSpecs.worker.maxReplicas",
        slots=("spec.slotsPerWorker",),
        replaced_once_gone=True,
        horovod=True,
        run=False,
    ),
    ("batch.volcano.sh", "Job"): Kind(
        ("spec.tasks.*.template",), name_label="volcano.sh/job-name", replaced_once_gone=True
    ),
    ("jobset.x-k8s.io", "JobSet"): Kind(
        ("spec.replicatedJobs.*.template.spec.template",),
        name_label=_JOBSET_NAME,
        of_jobs=True,
        job_restarts="spec.failurePolicy.maxRestarts",
    ),
    ("trainer.kubeflow.org", "TrainingRuntime"): Kind(
        ("spec.template.spec.replicatedJobs.node.template.spec.template",),
        main_container="node",
        job_name_label=_JOBSET_NAME,
        of_jobs=True,
        job_restarts="spec.template.spec.failurePolicy.maxRestarts",
    ),
    ("trainer.kubeflow.org", "ClusterTrainingRuntime"): Kind(
        ("spec.template.spec.replicatedJobs.node.template.spec.template",),
        main_container="node",
        job_name_label=_JOBSET_NAME,
        of_jobs=True,
        job_restarts="spec.template.spec.failurePolicy.maxRestarts",
    ),
    ("leaderworkerset.x-k8s.io", "LeaderWorkerSet"): Kind(
        ("spec.leaderWorkerTemplate.leaderTemplate", "spec.leaderWorkerTemplate.workerTemplate"),
        name_label="leaderworkerset.sigs.k8s.io/name",
        replaced_once_gone=True,
        endless=True,
    ),
}


_OF_VERSIONS: Mapping[tuple[str, str, str], Kind] = {
    ("kubeflow.org", "v2beta1", "MPIJob"): replace(
        KINDS["kubeflow.org", "MPIJob"], lasting=None, run=False, sshd=True
    ),
}
"""The kinds of which a version belongs to another operator."""


@dataclass(frozen=True, slots=True)
class Template:
    """One pod template: its node, and the path that leads to it."""

    node: Node
    path: str
    role: Role


@dataclass(frozen=True, slots=True)
class Workload:
    """One object of the text."""

    node: Node

    @property
    def group(self) -> str:
        """The API group."""
        return text_of(child(self.node, "apiVersion")).rpartition("/")[0]

    @property
    def kind(self) -> str:
        """The kind, as it is written."""
        return text_of(child(self.node, "kind"))

    @property
    def name(self) -> str:
        """The object's name; empty if only a prefix of it is known."""
        return text_of(child(self.node, "metadata", "name"))

    @property
    def prefix(self) -> str:
        """The beginning of the object's name if the rest is generated; else empty."""
        return "" if self.name else text_of(child(self.node, "metadata", "generateName"))

    @property
    def namespace(self) -> str:
        """The object's namespace; empty if it has none."""
        return text_of(child(self.node, "metadata", "namespace"))

    @property
    def is_pod(self) -> bool:
        """Whether it is a pod itself."""
        return (self.group, self.kind) == ("", "Pod")

    @property
    def label(self) -> str:
        """The object's name in messages."""
        return f"{self.kind or 'object'}/{self.name or self.prefix or '?'}"

    @property
    def known(self) -> Kind | None:
        """The facts about objects of this kind; None if it is unknown."""
        version = text_of(child(self.node, "apiVersion")).rpartition("/")[2]
        of_version = _OF_VERSIONS.get((self.group, version, self.kind))
        return of_version or KINDS.get((self.group, self.kind))

    def templates(self) -> list[Template]:
        """Return the pod templates of an object of this kind; none if the kind is unknown."""
        kind = self.known
        if kind is None:
            return []
        launcher = [] if kind.launcher is None else self.templates_at(kind.launcher, "launcher")
        return [*launcher, *(t for path in kind.templates for t in self.templates_at(path))]

    def templates_at(self, path: str, role: Role = "worker") -> list[Template]:
        """Return the pod templates at a path."""
        return [Template(node, where, role) for node, where in at(self.node, path)]

    def replaces_late(self, template: Template) -> bool:
        """Return whether the replacement of a pod is created only once that pod is gone."""
        kind = self.known or Kind(())
        if kind.replaced_once_gone or not kind.of_jobs:
            return kind.replaced_once_gone
        job = next(node for node, _ in at(self.node, template.path.rpartition(".")[0]))
        # With a podFailurePolicy, Failed is the default and the only replacement policy allowed.
        has_policy = value_of(child(job, "podFailurePolicy")) is not None
        return has_policy or text_of(child(job, "podReplacementPolicy")) == "Failed"

    def told(self, path: str | None) -> str:
        """Return the object's value at ``path`` as text; empty if it has no scalar there."""
        value: Any = value_of(child(self.node, *path.split("."))) if path else None
        return "" if value is None or isinstance(value, dict | list) else str(value)


def workloads(roots: list[Node]) -> Iterator[Workload]:
    """Yield every object of a text, including those inside lists."""
    for root in roots:
        if text_of(child(root, "kind")).endswith("List") and child(root, "items") is not None:
            yield from workloads(items(child(root, "items")))
        elif isinstance(root, MappingNode):
            yield Workload(root)


def at(node: Node, path: str, walked: str = "") -> Iterator[tuple[Node, str]]:
    """Yield every node that a path leads to, and the path without wildcards to it."""
    part, _, rest = path.partition(".")
    if not part:
        yield node, walked
        return
    for name, below in steps(node):
        if part in ("*", name):
            yield from at(below, rest, f"{walked}.{name}" if walked else name)


def steps(node: Node) -> Iterator[tuple[str, Node]]:
    """Yield the nodes directly below a node, each with the word that leads to it in a path."""
    for index, item in enumerate(items(node)):
        yield text_of(child(item, "name")) or str(index), item
    for name in keys(node):
        below = child(node, name)
        assert below is not None
        yield name, below
