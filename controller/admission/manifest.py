# SPDX-License-Identifier: Apache-2.0
"""What ``muster inject`` would have been given for a pod: its owner, the pod as the template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from controller.admission.owner import Owner
from injection.grace import GRACE
from injection.workloads import KINDS, Role

SERVERS_GRACE_S = 30
"""What the API server writes where nobody gave a grace: it cannot be told from a user's."""

_BOUNDS = re.compile(r"(\d+):(\d+)", re.ASCII)


def manifest_of(
    pod: Mapping[str, Any], namespace: str, owner: Owner | None, read: Mapping[str, Any] | None
) -> tuple[dict[str, Any], str, Role]:
    """Put the pod where its owner has a template; return the object, that path and the role.

    ``read`` is the object that ``owner.read`` names, as the API has it, or None.
    """
    template = {
        "metadata": dict(pod.get("metadata") or {}),
        "spec": {
            key: value
            for key, value in pod["spec"].items()
            if (key, value) != (GRACE, SERVERS_GRACE_S)
        },
    }
    if owner is None:
        return {"apiVersion": "v1", "kind": "Pod", **template}, "", "worker"
    words = owner.path.split(".")
    beside = _beside(pod, owner, read)
    below: Any = template
    for depth in range(len(words) - 1, 0, -1):
        here = ".".join(words[:depth])
        if words[depth - 1] in ("tasks", "replicatedJobs"):
            below = [{"name": words[depth], **below}]
        else:
            below = {**beside.get(here, {}), words[depth]: below}
    metadata = {"name": owner.name, "namespace": namespace}
    kind = KINDS.get((owner.group, owner.kind))
    is_launcher = kind is not None and owner.path == kind.launcher
    whole = {
        "apiVersion": owner.api_version,
        "kind": owner.kind,
        "metadata": metadata,
        words[0]: below,
    }
    return whole, owner.path, "launcher" if is_launcher else "worker"


def _beside(
    pod: Mapping[str, Any], owner: Owner, read: Mapping[str, Any] | None
) -> dict[str, Mapping[str, Any]]:
    """What the owner says beside the template, by the path of the mapping that says it."""
    if read is not None:
        spec = dict(read.get("spec") or {})
        parent = owner.path.rpartition(".")[0]
        if read.get("kind") == "Job":
            # Its own words are beside its template, however deep that lies in what made the Job.
            return {parent: spec}
        replicas: Any = spec
        for word in parent.split(".")[1:]:
            replicas = replicas.get(word) if isinstance(replicas, Mapping) else None
        return {parent: replicas if isinstance(replicas, Mapping) else {}, "spec": spec}
    if (owner.group, owner.kind) == ("kubeflow.org", "PyTorchJob"):
        for container in pod["spec"].get("containers") or []:
            for variable in container.get("env") or []:
                bounds = _BOUNDS.fullmatch(str(variable.get("value")))
                if variable.get("name") == "PET_NNODES" and bounds:
                    least, most = int(bounds[1]), int(bounds[2])
                    return {"spec": {"elasticPolicy": {"minReplicas": least, "maxReplicas": most}}}
    return {}
