# SPDX-License-Identifier: Apache-2.0
"""The manifest of a pod's owner, with the pod as its template, as input for ``muster inject``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.admission.owner import Owner
from injection.grace import GRACE
from injection.kinds import kind_of
from injection.workloads import Role

SERVERS_GRACE_S = 30
"""The grace that the API server sets by default; it looks the same as one that a user set."""


def manifest_of(
    pod: Mapping[str, Any], namespace: str, owner: Owner | None, read: Mapping[str, Any] | None
) -> tuple[dict[str, Any], str, Role]:
    """Put the pod in place of its owner's template.

    Returns the object, the path of the template in it and the pod's role. ``read`` is the object
    that ``owner.read`` names, as the API has it, or None.
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
    kind = kind_of(owner.api_version, owner.kind)
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
    """Return the owner's fields beside the template, by the path of the mapping that has them."""
    if read is not None:
        spec = dict(read.get("spec") or {})
        parent, *_ = owner.path.rpartition(".")
        if read.get("kind") == "Job":
            # A Job's fields are beside its own template, at any depth within the object that made
            # it.
            return {parent: spec}
        # At each depth: beside a worker's template is the launcher's, whose command has the size.
        beside: dict[str, Mapping[str, Any]] = {}
        below: Any = {"spec": spec}
        for depth, word in enumerate(words := parent.split("."), 1):
            found = below.get(word)
            below = found if isinstance(found, Mapping) else {}
            beside[".".join(words[:depth])] = below
        return beside
    return {}
