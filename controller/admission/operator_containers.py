# SPDX-License-Identifier: Apache-2.0
"""Containers that an operator adds to a pod beside those of its template.

They have no security context, whatever the template's have, and no field of the owner gives them
one: a namespace that enforces *restricted* rejects the pod because of them alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.admission.owner import Owner

DELIVERED: Mapping[str, str] = {"MPIJob": "kubectl-delivery"}
"""The init container that an operator adds, by the owner's kind: training-operator 1.8.1,
``pkg/controller.v1/mpi/mpijob_controller.go``, for its launcher."""

_SECURITY = "securityContext"


def with_security_context(pod: Mapping[str, Any], owner: Owner | None) -> Mapping[str, Any]:
    """Return the pod with the operator's container as restricted as the user's.

    It gets the security context of the template's first container. The pod is returned unchanged if
    that container has none, or the operator's has one already.
    """
    name = DELIVERED.get(owner.kind) if owner is not None else None
    spec: Mapping[str, Any] = pod.get("spec") or {}
    inits: list[Mapping[str, Any]] = spec.get("initContainers") or []
    containers: list[Mapping[str, Any]] = spec.get("containers") or []
    users = containers[0].get(_SECURITY) if containers else None
    if name is None or not users:
        return pod
    completed = [
        {**one, _SECURITY: users} if one.get("name") == name and not one.get(_SECURITY) else one
        for one in inits
    ]
    return {**pod, "spec": {**spec, "initContainers": completed}} if inits else pod
