# SPDX-License-Identifier: Apache-2.0
"""The objects of a submitted job: an Indexed Job, or the launcher and workers of a horovodrun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from console.submit.pod_template import CONTAINER
from console.submit.submission import GRACE_S, Submission
from injection import text_edits
from injection.failure_policy import GRACE, NEVER, POLICY, RESTART, policy_for
from injection.kinds import job_label
from injection.settings import ASKS, LABEL, annotation
from injection.text_edits import Style

Object = dict[str, Any]
Form = Literal["Job", "MPIJob", "StatefulSet"]
"""The kind that runs the job: MPIJob and StatefulSet (the workers of a launcher's Job) are for a
horovodrun."""

MADE_BY, SUBMIT = "app.kubernetes.io/managed-by", "muster-submit"
"""The label of every object that ``muster submit`` makes, and its value."""
WORKERS = "worker"
_INSTANCE, _COMPONENT = "app.kubernetes.io/instance", "app.kubernetes.io/component"
KEPT_S = 600
"""Time for which the objects of a horovodrun without an operator stay after its end."""


def objects(job: Submission, form: Form = "Job", namespace: str | None = None) -> list[Object]:
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


def _job(job: Submission) -> Object:
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


def _mpi_job(job: Submission) -> Object:
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


def _launcher(job: Submission) -> Object:
    container = str(job.template.container.get("name"))
    spec = {
        "backoffLimit": job.retries,
        "ttlSecondsAfterFinished": KEPT_S,
        POLICY: policy_for(container),
        "template": _template(job, _launching(job), role="launcher"),
    }
    return _object("batch/v1", "Job", job.name, spec)


def _workers(job: Submission) -> Object:
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


def _object(version: str, kind: str, name: str, spec: Mapping[str, Any]) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _template(job: Submission, container: Mapping[str, Any], *, role: str = "") -> Object:
    """Return the pod template with ``container``; ``role``: of a horovodrun's pod."""
    said = {"min_nodes": str(job.least), "max_nodes": str(job.most), "sizes": job.sizes}
    if job.horovod:
        said["slots"] = str(_slots(job))
    if role:
        said |= {"job": job.name, "horovod": role}
    annotations = {annotation(name): text for name, text in said.items() if text}
    metadata = {
        "labels": {**job.template.labels, **job.labels, ASKS: "true"},
        "annotations": {**job.template.annotations, **annotations},
    }
    return {"metadata": metadata, "spec": _pod(job, container)}


def _pod(job: Submission, container: Mapping[str, Any]) -> Object:
    pod: Object = dict(job.template.spec)
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


def _trainer(job: Submission) -> Object:
    """Return the container that trains, with all that the options say of it."""
    container: Object = {**job.template.container}
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


def _launching(job: Submission) -> Object:
    """Return the container of the horovodrun: it trains nothing, so it needs no accelerators."""
    container = _trainer(job)
    resources = container.pop("resources", {})
    for part in resources.values():
        part.pop(job.gpus[0] if job.gpus else "", None)
    if resources := {key: part for key, part in resources.items() if part}:
        container["resources"] = resources
    return container


def _idle(job: Submission) -> Object:
    """Return the container in which the workers of a horovodrun are started."""
    container = _trainer(job)
    for key in ("command", "args"):
        container.pop(key, None)
    return container


def _slots(job: Submission) -> int:
    return job.gpus[1] if job.gpus else 1
