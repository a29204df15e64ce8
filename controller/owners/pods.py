# SPDX-License-Identifier: Apache-2.0
"""A pod as far as it matters here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controller.admission.owner import Owner, owner_of
from controller.cluster.api import Object
from rdzv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PodSeen:
    """What is kept of one pod.

    ``owner`` is what its job lives as long as, ``maker`` the ownerReference of what made the pod
    itself. ``disruption``: why Kubernetes is about to end it, as its condition says; empty without.
    ``tolerates``: keys of taints that it names. ``deleted``: its end has begun.
    """

    uid: str
    namespace: str
    name: str
    node: str
    owner: Owner | None
    maker: Mapping[str, Any] | None
    tolerates: frozenset[str] = frozenset()
    disruption: str = ""
    deleted: bool = False

    @property
    def reference(self) -> dict[str, Any]:
        """What an Event says of it."""
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": self.name,
            "namespace": self.namespace,
            "uid": self.uid,
        }


def pod_seen(pod: Object) -> PodSeen:
    """Take from a pod what matters."""
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    conditions = (pod.get("status") or {}).get("conditions") or []
    references = metadata.get("ownerReferences") or []
    disrupted = (
        ": ".join(filter(None, (one.get("reason", ""), one.get("message", ""))))
        for one in conditions
        if one.get("type") == "DisruptionTarget" and one.get("status") == "True"
    )
    return PodSeen(
        uid=metadata["uid"],
        namespace=metadata.get("namespace", ""),
        name=metadata["name"],
        node=spec.get("nodeName") or "",
        owner=_owner(pod),
        maker=next((one for one in references if one.get("controller")), None),
        tolerates=frozenset(one["key"] for one in spec.get("tolerations") or [] if one.get("key")),
        disruption=next((text or "DisruptionTarget" for text in disrupted), ""),
        deleted=bool(metadata.get("deletionTimestamp")),
    )


def _owner(pod: Object) -> Owner | None:
    try:
        return owner_of(pod)
    except (ConfigError, KeyError, TypeError):
        return None  # an ownerReference of another make: the pod is told of alone
