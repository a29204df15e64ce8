# SPDX-License-Identifier: Apache-2.0
"""Creation of a job's objects: what is wrong is found first, and nothing stays half-made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from controller.cluster import paths
from controller.cluster.api import ClusterApi, Object
from injection import sidecar
from injection.kinds import job_label
from injection.settings import LABEL, annotation
from rdzv.errors import ClusterError, ClusterRefused, ClusterUnavailable, ConfigError

TRIAL_TIMEOUT_S = 30.0
"""Timeout of a trial pod: webhooks may take some seconds each."""
_GONE, _FORBIDDEN, _TAKEN = 404, 403, 409
_STRICT = "?fieldValidation=Strict"
_TRIAL = "?dryRun=All"
_KUBEFLOW = "/apis/kubeflow.org/v1"


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
            if error.status == _GONE:
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
        if error.status == _FORBIDDEN and waits:
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
