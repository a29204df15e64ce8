# SPDX-License-Identifier: Apache-2.0
"""The pods that controllers make of an object, as an API server shows them to a webhook."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from injection.workloads import Workload
from injection.yaml_tree import node_of

UID = "0f4c2a52-6a4b-4e0c-8d4b-0d6f2d1a7c11"
HASH = "7d9c6b8f4d"

_CONTAINER = {
    "terminationMessagePath": "/dev/termination-log",
    "terminationMessagePolicy": "File",
    "imagePullPolicy": "IfNotPresent",
    "resources": {},
}
_POD = {
    "restartPolicy": "Always",
    "dnsPolicy": "ClusterFirst",
    "securityContext": {},
    "schedulerName": "default-scheduler",
    "terminationGracePeriodSeconds": 30,
}


def defaulted(template: Any) -> dict[str, Any]:
    """A template with what the API server writes where a user has not."""
    made: dict[str, Any] = copy.deepcopy(template)
    # What is null is not there for a server.
    pod = {key: value for key, value in made["spec"].items() if value is not None}
    for kind in ("initContainers", "containers"):
        for number, container in enumerate(pod.get(kind) or []):
            told = {key: value for key, value in container.items() if value is not None}
            pod[kind][number] = {**_CONTAINER, **told}
    metadata = {k: v for k, v in (made.get("metadata") or {}).items() if v is not None}
    return {"metadata": metadata, "spec": {**_POD, **pod}}


def pods_of(made: Any) -> Iterator[tuple[str, dict[str, Any], dict[str, Any] | None]]:
    """Where a template is, a pod of it, and the object that tells more of it, if there is one."""
    workload = Workload(node_of(made))
    for template in workload.templates():
        yield template.path, *_pod(workload, made, template.path)


def at(made: Any, path: str) -> Any:
    """What a path leads to in plain data; items of lists go by their names."""
    for word in filter(None, path.split(".")):
        made = next(i for i in made if i["name"] == word) if isinstance(made, list) else made[word]
    return made


def _pod(workload: Workload, made: Any, path: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    pod = {"apiVersion": "v1", "kind": "Pod", **defaulted(at(made, path))}
    if workload.is_pod:
        return pod, None
    version, kind, name = made["apiVersion"], made["kind"], made["metadata"]["name"]
    labels, read = dict[str, str](), None
    if kind == "Deployment":
        kind, name = "ReplicaSet", f"{name}-{HASH}"
        labels["pod-template-hash"] = HASH
    elif version == "batch/v1":
        read = at(made, path.rpartition(".")[0].rpartition(".")[0])
        name, kind = (f"{name}-29", "Job") if kind == "CronJob" else (name, kind)
    elif version.startswith("kubeflow.org"):
        labels["training.kubeflow.org/replica-type"] = path.split(".")[2].lower()
        read = made
    elif version.startswith("kai."):
        pod["metadata"]["name"] = f"{name}-{path.split('.')[2]}"
        read = made
    elif version.startswith("batch.volcano"):
        labels["volcano.sh/task-spec"] = path.split(".")[2]
    elif kind in ("JobSet", "TrainingRuntime", "ClusterTrainingRuntime"):
        labels["jobset.sigs.k8s.io/jobset-name"] = name
        labels["jobset.sigs.k8s.io/replicatedjob-name"] = path.split(".")[-4]
        if kind != "JobSet":
            labels["trainer.kubeflow.org/trainjob-ancestor-step"] = "trainer"
        read = at(made, path.rpartition(".")[0].rpartition(".")[0])
        version, kind, name = "batch/v1", "Job", f"{name}-{path.split('.')[-4]}-0"
    elif kind == "LeaderWorkerSet":
        labels["leaderworkerset.sigs.k8s.io/name"] = name
        version, kind = "apps/v1", "StatefulSet"
    if version == "batch/v1":
        labels["batch.kubernetes.io/job-name"] = name
        labels["batch.kubernetes.io/controller-uid"] = UID
        read = {"apiVersion": version, "kind": "Job", **(read or {})}
    maker = {"apiVersion": version, "kind": kind, "name": name, "uid": UID, "controller": True}
    metadata = pod["metadata"]
    metadata["labels"] = {**metadata.get("labels", {}), **labels}
    metadata["ownerReferences"] = [maker]
    return pod, read
