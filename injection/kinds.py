# SPDX-License-Identifier: Apache-2.0
"""The table of the known kinds of objects: a row has all that is known of one; the job's label."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from injection.counts import Count, of_groups, of_job, of_jobs, of_replicas

PLAIN_PATH = "spec.template"
"""The path of the template in an object that has one."""


@dataclass(frozen=True, slots=True)
class PodSigns:
    """The signs by which a pod shows its object of a kind, and its template in it.

    ``maker``: group and kind of the controller in its owner reference, if another object than this
    one makes the pods; ``version`` is then the API version of this one. ``marks``: labels of all
    its pods; an empty value is any. ``named``: the label that holds the object's name, if it is not
    the maker's; ``suffix``: the one whose value follows the object's name in the maker's.
    ``made``: the name that the maker then has. ``path``: the template's, where ``{part}`` is the
    pod's part in the job, and ``{Part}`` that word with a capital. ``parts``: the labels that hold
    the part, the first one that a pod has counts; ``ending``: a part that its name ends with;
    ``otherwise``: the part of a pod without these; ``only``: the parts of which one must be shown.
    ``read``: the object says more than its pods, and is read: the maker, if the maker is another.
    ``must_be_read``: pods never show enough.
    """

    maker: tuple[str, str] | None = None
    version: str = ""
    marks: tuple[tuple[str, str], ...] = ()
    named: str = ""
    suffix: str = ""
    made: str = ""
    path: str = PLAIN_PATH
    parts: tuple[str, ...] = ()
    ending: str = ""
    otherwise: str = "worker"
    only: tuple[str, ...] = ()
    read: bool = False
    must_be_read: bool = False


@dataclass(frozen=True, slots=True)
class Scaling:
    """The number of an object's pods, and the way to change it.

    ``numbers``: the paths of the numbers that are written, all the same. ``by_scale``: by the
    subresource ``scale``. ``index`` finds a pod's index in its name; None: they have none.
    ``first``: the path of the lowest index. ``least``: the smallest number that may be written.
    """

    numbers: tuple[str, ...]
    by_scale: bool = False
    index: re.Pattern[str] | None = None
    first: str = ""
    least: int = 0

    @property
    def by_index(self) -> bool:
        """Whether its pods have indexes, and the highest goes first."""
        return self.index is not None


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object: the paths to its pod templates, and to its statements on the job.

    In a path ``*`` is every entry or item, and another word is a key, or the name of an item.
    ``launcher``: a central launcher's template, which has no slots. ``master``: the template whose
    end ends the whole job. The labels are those of its pods that hold the name and the UID of
    an object that lives as long as the job does, and the number of the pod (an empty variable
    if this object gives none). ``name_label``: the one that holds its own name, which is
    generated if it has only a ``generateName``. ``tells_torch``: the program that puts
    ``PET_*`` variables behind those of the template, where they win. ``replaced_once_gone``: a
    new pod has the name or the place of the old one, and is created after that is gone; with
    ``of_jobs`` the batch Job decides this. ``job_restarts``: how often the object makes a Job
    again that has failed. ``endless``: its containers are restarted however they end.
    ``run``: whether this was ever run with its operator. ``lasting``: the entry that the worker's
    replica spec needs so that a worker's end does not end the job. ``sshd``: an MPI program in its
    launcher reaches the workers by the sshd in whose place muster-exec runs.

    ``plural``: its objects in the API's paths; empty if none is read, changed or deleted.
    ``counts``: its templates and the pods that it asks for. ``scaled``: how their number is
    changed; None: by the command ``by_hand``, with the object's name for ``{name}``.
    ``delivered``: the init container that its operator adds.
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
    run: bool = True
    lasting: tuple[str, str] | None = None
    sshd: bool = False
    plural: str = ""
    shown: tuple[PodSigns, ...] = (PodSigns(),)
    counts: Count | None = None
    scaled: Scaling | None = None
    by_hand: str = ""
    delivered: str = ""


_JOB_UID = "batch.kubernetes.io/controller-uid"
_JOB_NAME = "batch.kubernetes.io/job-name"
_JOB_INDEX = "batch.kubernetes.io/job-completion-index"
_JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
"""The name of the JobSet, which is also that of the TrainJob that it belongs to."""
_JOBSET_PART = "jobset.sigs.k8s.io/replicatedjob-name"
_TRAIN_JOB = "trainer.kubeflow.org/trainjob-ancestor-step"
_GROUP_NAME = "leaderworkerset.sigs.k8s.io/name"
_KUBEFLOW_NAME = "training.kubeflow.org/job-name"
_KUBEFLOW_INDEX = "training.kubeflow.org/replica-index"
_KUBEFLOW_PART = "training.kubeflow.org/replica-type"
_MPI_PART = "training.kubeflow.org/job-role"
_OPERATOR = "training.kubeflow.org/operator-name"
_TEMPLATE_HASH = "pod-template-hash"

_LAST = re.compile(r"-(\d+)\Z", re.ASCII)
_BEFORE_SUFFIX = re.compile(r"-(\d+)-[a-z0-9]{5}\Z", re.ASCII)

_PLAIN = Kind(("spec.template",), endless=True)
_OF_REPLICA_SET = PodSigns(
    ("apps", "ReplicaSet"), marks=((_TEMPLATE_HASH, ""),), suffix=_TEMPLATE_HASH
)
_OF_JOB = PodSigns(("batch", "Job"), named=_JOBSET_NAME, read=True)
_OF_MPI = PodSigns(
    path="spec.mpiReplicaSpecs.{Part}.template",
    parts=(_KUBEFLOW_PART, _MPI_PART),
    only=("launcher", "worker"),
    read=True,
)
_RUNTIME = Kind(
    ("spec.template.spec.replicatedJobs.node.template.spec.template",),
    main_container="node",
    job_name_label=_JOBSET_NAME,
    of_jobs=True,
    job_restarts="spec.template.spec.failurePolicy.maxRestarts",
    by_hand="kubectl edit trainjob/{name}   # spec.trainer.numNodes",
)

KINDS: Mapping[tuple[str, str], Kind] = {
    ("", "Pod"): Kind(("",)),
    ("", "PodTemplate"): Kind(("template",)),
    ("", "ReplicationController"): _PLAIN,
    ("apps", "Deployment"): replace(
        _PLAIN,
        plural="deployments",
        shown=(_OF_REPLICA_SET,),
        counts=of_replicas("spec", needs_number=True),
        scaled=Scaling(("spec.replicas",), by_scale=True),
    ),
    ("apps", "StatefulSet"): Kind(
        ("spec.template",),
        index_label="apps.kubernetes.io/pod-index",
        replaced_once_gone=True,
        endless=True,
        plural="statefulsets",
        counts=of_replicas("spec", needs_number=True),
        scaled=Scaling(("spec.replicas",), by_scale=True, index=_LAST, first="spec.ordinals.start"),
    ),
    ("apps", "ReplicaSet"): replace(
        _PLAIN, by_hand="kubectl scale replicasets/{name} --replicas=N"
    ),
    ("apps", "DaemonSet"): Kind(("spec.template",), replaced_once_gone=True, endless=True),
    ("batch", "Job"): Kind(
        ("spec.template",),
        name_label=_JOB_NAME,
        job_uid_label=_JOB_UID,
        index_label=_JOB_INDEX,
        of_jobs=True,
        plural="jobs",
        shown=(PodSigns(read=True),),
        counts=of_job,
        scaled=Scaling(("spec.parallelism", "spec.completions"), index=_BEFORE_SUFFIX, least=1),
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
        plural="pytorchjobs",
        shown=(
            PodSigns(
                path="spec.pytorchReplicaSpecs.{Part}.template", parts=(_KUBEFLOW_PART,), read=True
            ),
        ),
        counts=of_replicas("spec.pytorchReplicaSpecs.*"),
        scaled=Scaling(("spec.pytorchReplicaSpecs.Worker.replicas",), index=_LAST),
    ),
    ("kubeflow.org", "MPIJob"): Kind(
        ("spec.mpiReplicaSpecs.Worker.template",),
        launcher="spec.mpiReplicaSpecs.Launcher.template",
        slots=("spec.slotsPerWorker",),
        name_label=_KUBEFLOW_NAME,
        index_label=_KUBEFLOW_INDEX,
        replaced_once_gone=True,
        lasting=("restartPolicy", "ExitCode"),
        plural="mpijobs",
        shown=(_OF_MPI,),
        counts=of_replicas("spec.mpiReplicaSpecs.Worker"),  # the launcher does not train
        scaled=Scaling(("spec.mpiReplicaSpecs.Worker.replicas",), index=_LAST),
        # training-operator 1.8.1, pkg/controller.v1/mpi/mpijob_controller.go: for its launcher.
        delivered="kubectl-delivery",
    ),
    ("kai.alibabacloud.com", "TrainingJob"): Kind(
        ("spec.etReplicaSpecs.worker.template",),
        launcher="spec.etReplicaSpecs.launcher.template",
        least="spec.etReplicaSpecs.worker.minReplicas",
        most="spec.etReplicaSpecs.worker.maxReplicas",
        slots=("spec.slotsPerWorker",),
        replaced_once_gone=True,
        run=False,
        plural="trainingjobs",
        # Its operator names launchers this way; the labels differ between releases.
        shown=(PodSigns(path="spec.etReplicaSpecs.{part}.template", ending="launcher", read=True),),
        by_hand="kubectl create -f FILE   # an object ScaleOut or ScaleIn of et-operator",
    ),
    ("batch.volcano.sh", "Job"): Kind(
        ("spec.tasks.*.template",),
        name_label="volcano.sh/job-name",
        replaced_once_gone=True,
        shown=(PodSigns(path="spec.tasks.{part}.template", parts=("volcano.sh/task-spec",)),),
        by_hand="kubectl edit jobs.batch.volcano.sh/{name}   # minAvailable, replicas of a task",
    ),
    ("jobset.x-k8s.io", "JobSet"): Kind(
        ("spec.replicatedJobs.*.template.spec.template",),
        name_label=_JOBSET_NAME,
        of_jobs=True,
        job_restarts="spec.failurePolicy.maxRestarts",
        plural="jobsets",
        shown=(
            replace(
                _OF_JOB,
                version="jobset.x-k8s.io/v1alpha2",
                marks=((_JOBSET_NAME, ""),),
                path="spec.replicatedJobs.{part}.template.spec.template",
                parts=(_JOBSET_PART,),
                otherwise="workers",
            ),
        ),
        counts=of_jobs,
        by_hand="kubectl edit jobset/{name}   # parallelism and completions of its replicatedJobs",
    ),
    ("trainer.kubeflow.org", "TrainingRuntime"): replace(
        _RUNTIME,
        shown=(
            replace(
                _OF_JOB,
                version="trainer.kubeflow.org/v1alpha1",
                marks=((_JOBSET_NAME, ""), (_TRAIN_JOB, "")),
                path=_RUNTIME.templates[0],
            ),
        ),
    ),
    ("trainer.kubeflow.org", "ClusterTrainingRuntime"): _RUNTIME,
    ("leaderworkerset.x-k8s.io", "LeaderWorkerSet"): Kind(
        ("spec.leaderWorkerTemplate.leaderTemplate", "spec.leaderWorkerTemplate.workerTemplate"),
        name_label=_GROUP_NAME,
        replaced_once_gone=True,
        endless=True,
        plural="leaderworkersets",
        shown=(
            PodSigns(
                ("apps", "StatefulSet"),
                version="leaderworkerset.x-k8s.io/v1",
                marks=((_GROUP_NAME, ""),),
                named=_GROUP_NAME,
                path="spec.leaderWorkerTemplate.workerTemplate",
            ),
        ),
        counts=of_groups,
        by_hand="kubectl scale leaderworkersets/{name} --replicas=N   # N groups of pods",
    ),
}

OF_VERSIONS: Mapping[tuple[str, str, str], Kind] = {
    ("kubeflow.org", "v2beta1", "MPIJob"): replace(
        KINDS["kubeflow.org", "MPIJob"],
        lasting=None,
        run=False,
        sshd=True,
        shown=(
            replace(_OF_MPI, must_be_read=True),
            replace(
                _OF_MPI,
                maker=("batch", "Job"),
                version="kubeflow.org/v2beta1",
                marks=((_OPERATOR, "mpi-operator"),),
                named=_KUBEFLOW_NAME,
                made="{name}-launcher",
                only=("launcher",),
                must_be_read=True,
            ),
        ),
    ),
}
"""The kinds of which a version belongs to another operator."""

FRAMEWORKS = frozenset({"kubeflow.org"})
"""The groups whose other kinds run other frameworks, which do not train through Muster."""


def kind_of(api_version: str, kind: str) -> Kind | None:
    """Return the row of a kind; None if it is unknown."""
    group, _, version = api_version.rpartition("/")
    return OF_VERSIONS.get((group, version, kind)) or KINDS.get((group, kind))


LABEL_LENGTH_MAX = 63
"""The longest value of a label that Kubernetes accepts, in characters."""

_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)
_DIGEST_LENGTH = 16


def job_label(job: str) -> str:
    """Return the job's name or, if no label can have it, its beginning and a digest of it all."""
    if _VALUE.fullmatch(job):
        return job
    digest = hashlib.sha256(job.encode()).hexdigest()[:_DIGEST_LENGTH]
    return f"{job[: LABEL_LENGTH_MAX - _DIGEST_LENGTH - 1].rstrip('._-')}-{digest}"
