# SPDX-License-Identifier: Apache-2.0
"""Containers that an operator adds to a pod beside those of its template.

They have no security context, whatever the template's have, and no field of the owner gives them
one: a namespace that enforces *restricted* rejects the pod because of them alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.admission.owner import Owner
from injection.kinds import kind_of

_SECURITY = "securityContext"


def with_security_context(pod: Mapping[str, Any], owner: Owner | None) -> Mapping[str, Any]:
    """Return the pod with the operator's container as restricted as the user's.

    It gets the security context of the template's first container. The pod is returned unchanged if
    that container has none, or the operator's has one already.
    """
    kind = kind_of(owner.api_version, owner.kind) if owner is not None else None
    name = kind.delivered if kind is not None else ""
    spec: Mapping[str, Any] = pod.get("spec") or {}
    inits: list[Mapping[str, Any]] = spec.get("initContainers") or []
    containers: list[Mapping[str, Any]] = spec.get("containers") or []
    users = containers[0].get(_SECURITY) if containers else None
    if not name or not users:
        return pod
    completed = [
        {**one, _SECURITY: users} if one.get("name") == name and not one.get(_SECURITY) else one
        for one in inits
    ]
    return {**pod, "spec": {**spec, "initContainers": completed}} if inits else pod
