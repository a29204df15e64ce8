# SPDX-License-Identifier: Apache-2.0
"""The objects of a submitted job, and their creation: an Indexed Job, or a central launcher's.

What is wrong is found first, and nothing stays half-made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote

from console.remote.pods import FORBIDDEN
from console.submit.pod_template import CONTAINER
from console.submit.submission import GRACE_S, Submission
from controller.cluster import paths
from controller.cluster.api import NOT_FOUND, ClusterApi, Object
from injection import sidecar, text_edits
from injection.failure_policy import GRACE, NEVER, POLICY, RESTART, policy_for
from injection.kinds import job_label
from injection.settings import ASKS, LABEL, annotation
from injection.text_edits import Style
from rdzv.errors import ClusterError, ClusterRefused, ClusterUnavailable, ConfigError

ManifestObject = dict[str, Any]
Form = Literal["Job", "MPIJob", "StatefulSet"]
"""The kind that runs the job: MPIJob and StatefulSet (the workers of a launcher's Job) are for a
central launcher."""

MADE_BY, SUBMIT = "app.kubernetes.io/managed-by", "muster-submit"
"""The label of every object that ``muster submit`` makes, and its value."""
WORKERS = "worker"
_INSTANCE, _COMPONENT = "app.kubernetes.io/instance", "app.kubernetes.io/component"
KEPT_S = 600
"""Time for which the objects of a central launcher without an operator stay after its end."""

TRIAL_TIMEOUT_S = 30.0
"""Timeout of a trial pod: webhooks may take some seconds each."""
_STRICT = "?fieldValidation=Strict"
_TRIAL = "?dryRun=All"
_KUBEFLOW = "/apis/kubeflow.org/v1"


def objects(
    job: Submission, form: Form = "Job", namespace: str | None = None
) -> list[ManifestObject]:
    """Return the objects of a job, its main one first."""
    if form == "Job":
        made = [_job(job)]
    elif form == "MPIJob":
        made = [_mpi_job(job)]
    else:
        made = [_launcher(job), _workers(job)]
    for one in made:
        metadata = one["metadata"]
        metadata["labels"] = {**job.labels, LABEL: job_label(job.name), MADE_BY: SUBMIT}
        if namespace is not None:
            one["metadata"] = {"name": metadata["name"], "namespace": namespace} | metadata
    return made


def rendered(made: Sequence[Mapping[str, Any]]) -> str:
    """Return the objects as YAML."""
    texts = ["\n".join(text_edits.block_mapping(one, 0, Style())) + "\n" for one in made]
    return "---\n".join(texts)


def _job(job: Submission) -> ManifestObject:
    container = str(job.template.container.get("name"))
    spec = {
        "completionMode": "Indexed",
        "completions": job.start,
        "parallelism": job.start,
        "backoffLimitPerIndex": job.retries,
        # It may be scaled down to min: maxFailedIndexes has to stay within completions.
        "maxFailedIndexes": min(job.most - job.least, job.least),
        "successPolicy": {"rules": [{"succeededCount": job.least}]},
        POLICY: policy_for(container),
        "template": _template(job, _trainer(job)),
    }
    return _object("batch/v1", "Job", job.name, spec)


def _mpi_job(job: Submission) -> ManifestObject:
    first, others = _template(job, _launching(job)), _template(job, _idle(job))
    for template in (first, others):
        del template["spec"][RESTART]
    launcher = {"replicas": 1, RESTART: "OnFailure", "template": first}
    workers = {"replicas": job.start, RESTART: "ExitCode", "template": others}
    spec = {
        "slotsPerWorker": _slots(job),
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": job.retries},
        "mpiReplicaSpecs": {"Launcher": launcher, "Worker": workers},
    }
    return _object("kubeflow.org/v1", "MPIJob", job.name, spec)


def _launcher(job: Submission) -> ManifestObject:
    container = str(job.template.container.get("name"))
    spec = {
        "backoffLimit": job.retries,
        "ttlSecondsAfterFinished": KEPT_S,
        POLICY: policy_for(container),
        "template": _template(job, _launching(job), role="launcher"),
    }
    return _object("batch/v1", "Job", job.name, spec)


def _workers(job: Submission) -> ManifestObject:
    template = _template(job, _idle(job), role="worker")
    del template["spec"][RESTART]
    name = f"{job.name}-{WORKERS}"
    labels = {_INSTANCE: job_label(job.name), _COMPONENT: WORKERS}
    template["metadata"]["labels"] |= labels
    spec = {
        "replicas": job.start,
        "serviceName": name,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels},
        "template": template,
    }
    return _object("apps/v1", "StatefulSet", name, spec)


def _object(version: str, kind: str, name: str, spec: Mapping[str, Any]) -> ManifestObject:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _template(job: Submission, container: Mapping[str, Any], *, role: str = "") -> ManifestObject:
    """Return the pod template with ``container``; ``role``: of a central launcher's pods."""
    said = {"min_nodes": str(job.least), "max_nodes": str(job.most), "sizes": job.sizes}
    if job.central:
        said["slots"] = str(_slots(job))
    if role:
        said |= {"job": job.name, "role": role}
    annotations = {annotation(name): text for name, text in said.items() if text}
    metadata = {
        "labels": {**job.template.labels, **job.labels, ASKS: "true"},
        "annotations": {**job.template.annotations, **annotations},
    }
    return {"metadata": metadata, "spec": _pod(job, container)}


def _pod(job: Submission, container: Mapping[str, Any]) -> ManifestObject:
    pod: ManifestObject = dict(job.template.spec)
    containers = list(pod["containers"])
    containers[job.template.index] = container
    pod |= {RESTART: NEVER, "containers": containers}
    if job.grace_s is not None or pod.get(GRACE) is None:
        pod[GRACE] = job.grace_s or GRACE_S
    words = {"priorityClassName": job.priority_class, "serviceAccountName": job.service_account}
    pod |= {key: word for key, word in words.items() if word}
    if job.selector:
        pod["nodeSelector"] = {**(pod.get("nodeSelector") or {}), **job.selector}
    secrets = [{"name": name} for name in job.pull_secrets]
    for key, more in (
        ("tolerations", job.tolerations),
        ("imagePullSecrets", secrets),
        ("volumes", job.volumes),
    ):
        if more:
            pod[key] = [*(pod.get(key) or []), *more]
    return pod


def _trainer(job: Submission) -> ManifestObject:
    """Return the container that trains, with all that the options say of it."""
    container: ManifestObject = {**job.template.container}
    container.setdefault("name", CONTAINER)
    if job.image:
        container["image"] = job.image
    if job.command:
        container.pop("args", None)
        container["command"] = list(job.command)
    if job.working_dir:
        container["workingDir"] = job.working_dir
    given = {one["name"] for one in job.env}
    kept = [one for one in container.get("env") or [] if one.get("name") not in given]
    for key, all_of_it in (
        ("env", [*kept, *job.env]),
        ("volumeMounts", [*(container.get("volumeMounts") or []), *job.mounts]),
    ):
        if all_of_it:
            container[key] = all_of_it
    requests = {"cpu": job.cpu, "memory": job.memory}
    limits = {"memory": job.memory, **({job.gpus[0]: str(job.gpus[1])} if job.gpus else {})}
    resources = dict(container.get("resources") or {})
    for key, amounts in (("requests", requests), ("limits", limits)):
        if more := {name: text for name, text in amounts.items() if text}:
            resources[key] = {**(resources.get(key) or {}), **more}
    if resources:
        container["resources"] = resources
    return container


def _launching(job: Submission) -> ManifestObject:
    """Return a central launcher's container: it trains nothing, so it needs no accelerators."""
    container = _trainer(job)
    resources = container.pop("resources", {})
    for part in resources.values():
        part.pop(job.gpus[0] if job.gpus else "", None)
    if resources := {key: part for key, part in resources.items() if part}:
        container["resources"] = resources
    return container


def _idle(job: Submission) -> ManifestObject:
    """Return the container in which a central launcher's workers are started."""
    container = _trainer(job)
    for key in ("command", "args"):
        container.pop(key, None)
    return container


def _slots(job: Submission) -> int:
    return job.gpus[1] if job.gpus else 1


def path_of(one: Mapping[str, Any], namespace: str) -> str:
    """Return the API path of an object that submit makes."""
    found = paths.owner(one["apiVersion"], one["kind"], namespace, one["metadata"]["name"])
    if found is None:
        raise ConfigError(f"{namespace!r} is no namespace: give another --namespace")
    return found


def called(one: Mapping[str, Any]) -> str:
    """Return the kind and the name of an object."""
    return f"{one['kind']} {one['metadata']['name']}"


async def has_mpi_jobs(api: ClusterApi) -> bool:
    """Return whether the cluster has the MPIJob of the training-operator."""
    try:
        found = await api.get(_KUBEFLOW)
    except ClusterRefused:
        return False
    return any(one.get("name") == "mpijobs" for one in found.get("resources") or [])


async def refuse_taken(
    api: ClusterApi, namespace: str, job: str, made: Sequence[Mapping[str, Any]]
) -> None:
    """Raise ``ConfigError`` if an object or pods of the job exist already."""
    remedy = f"muster delete {job} -n {namespace} removes it; or submit under another name"
    for one in made:
        try:
            there = await api.get(path_of(one, namespace))
        except ClusterRefused as error:
            if error.status == NOT_FOUND:
                continue
            raise
        raise ConfigError(
            f"{called(one)} exists already in namespace {namespace} ({state(there)}): {remedy}"
        )
    pods = f"{paths.core(namespace, 'pods')}?labelSelector={quote(f'{LABEL}={job_label(job)}')}"
    try:
        listed = await api.get(f"{pods}&limit=1")
    except ClusterRefused:
        return
    for pod in listed.get("items") or []:
        raise ConfigError(
            f"pod {pod['metadata']['name']} in namespace {namespace} is of a job {job}, and two"
            f" jobs of one name would meet in the store: {remedy}"
        )


def state(owner: Mapping[str, Any]) -> str:
    """Return in a word what an object is: going, complete, failed or active."""
    if owner["metadata"].get("deletionTimestamp"):
        return "it is being deleted"
    conditions = (owner.get("status") or {}).get("conditions") or []
    true = {one.get("type") for one in conditions if one.get("status") == "True"}
    if true & {"Complete", "Succeeded"}:
        return "complete"
    return "failed" if "Failed" in true else "active"


async def gets_sidecar(
    api: ClusterApi, namespace: str, job: str, template: Mapping[str, Any]
) -> bool | None:
    """Return whether the cluster's controller adds the sidecar to a pod of ``template``.

    The API server tries such a pod, and makes none. None if the user may not create pods; other
    refusals, which the job's pods would meet too, are raised.
    """
    metadata = template["metadata"]
    # A bare pod has to name its job, as no object does.
    annotations = {**metadata["annotations"], annotation("job"): job}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{job}-trial", **metadata, "annotations": annotations},
        "spec": template["spec"],
    }
    try:
        path = paths.core(namespace, "pods") + _TRIAL
        tried = await api.create(path, pod, TRIAL_TIMEOUT_S)
    except ClusterRefused as error:
        # A quota may have room later, and the right to make pods is not that to make jobs.
        waits = "exceeded quota" in str(error) or "cannot create resource" in str(error)
        if error.status == FORBIDDEN and waits:
            return None
        raise
    first = tried["spec"].get("initContainers") or []
    return any(one["name"] == sidecar.NAME for one in first)


async def create(api: ClusterApi, namespace: str, made: Sequence[Object]) -> None:
    """Create all objects, the later ones owned by the first; remove what was made if one fails."""
    done: list[Object] = []
    for one in made:
        if done:
            first = done[0]
            reference = {key: first[key] for key in ("apiVersion", "kind")}
            reference |= {key: first["metadata"][key] for key in ("name", "uid")}
            one = {**one, "metadata": {**one["metadata"], "ownerReferences": [reference]}}
        collection = path_of(one, namespace).rpartition("/")[0]
        try:
            answer = await api.create(collection + _STRICT, one)
        except ClusterError as error:
            raise await _unmade(api, namespace, done, one, error) from error
        done.append({**one, "metadata": answer["metadata"]})


async def _unmade(
    api: ClusterApi,
    namespace: str,
    done: Sequence[Object],
    failed: Object,
    error: ClusterError,
) -> ClusterError:
    """Remove what was made; return the error with what is left."""
    left = []
    for one in done:
        try:
            await api.delete(path_of(one, namespace) + "?propagationPolicy=Background")
        except ClusterError:
            left.append(called(one))
    sentence = str(error)
    if isinstance(error, ClusterUnavailable):
        sentence += f"; whether {called(failed)} was made is unknown"
        left.append(called(failed))
    if left:
        sentence += f"\nlook for what is left: {', '.join(left)} in namespace {namespace}"
    elif done:
        sentence += f"\nnothing is left: {', '.join(map(called, done))} was removed again"
    if isinstance(error, ClusterRefused):
        return ClusterRefused(sentence, error.status)
    return ClusterUnavailable(sentence)
