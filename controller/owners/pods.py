# SPDX-License-Identifier: Apache-2.0
"""The reduced view of a pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controller.admission.owner import Owner, owner_of
from controller.cluster.api import Object
from injection.settings import LABEL
from rdzv.errors import ConfigError

PREEMPTED = "PreemptionByScheduler"
"""Reason of the condition DisruptionTarget: the scheduler ends the pod to make room."""


@dataclass(frozen=True, slots=True)
class PodSeen:
    """The kept fields of one pod.

    ``owner``: the object with whose life the job's ends. ``maker``: the ownerReference of the
    object that created the pod itself. ``disruption``: why Kubernetes is about to end it, from its
    condition; empty without one. ``preempted``: that is to make room for a pod of a higher
    priority. ``tolerates``: keys of the taints that it tolerates. ``deleted``:
    whether its termination has begun. ``job``: the value of its label. ``unplaced``: whether the
    scheduler has found no node for it.
    """

    uid: str
    namespace: str
    name: str
    node: str
    owner: Owner | None
    maker: Mapping[str, Any] | None
    tolerates: frozenset[str] = frozenset()
    disruption: str = ""
    preempted: bool = False
    deleted: bool = False
    job: str = ""
    unplaced: bool = False

    @property
    def reference(self) -> dict[str, Any]:
        """The pod's object reference for Events."""
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": self.name,
            "namespace": self.namespace,
            "uid": self.uid,
        }


def pod_seen(pod: Object) -> PodSeen:
    """Reduce a pod to the fields that are kept."""
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    conditions = (pod.get("status") or {}).get("conditions") or []
    references = metadata.get("ownerReferences") or []
    disrupted = [
        one
        for one in conditions
        if one.get("type") == "DisruptionTarget" and one.get("status") == "True"
    ]
    sentences = (
        ": ".join(filter(None, (one.get("reason", ""), one.get("message", ""))))
        for one in disrupted
    )
    return PodSeen(
        uid=metadata["uid"],
        namespace=metadata.get("namespace", ""),
        name=metadata["name"],
        node=spec.get("nodeName") or "",
        owner=_owner(pod),
        maker=next((one for one in references if one.get("controller")), None),
        tolerates=frozenset(one["key"] for one in spec.get("tolerations") or [] if one.get("key")),
        disruption=next((text or "DisruptionTarget" for text in sentences), ""),
        preempted=any(one.get("reason") == PREEMPTED for one in disrupted),
        deleted=bool(metadata.get("deletionTimestamp")),
        job=(metadata.get("labels") or {}).get(LABEL, ""),
        unplaced=not metadata.get("deletionTimestamp")
        and any(
            (one.get("type"), one.get("reason")) == ("PodScheduled", "Unschedulable")
            and one.get("status") == "False"
            for one in conditions
        ),
    )


def _owner(pod: Object) -> Owner | None:
    try:
        return owner_of(pod)
    except (ConfigError, KeyError, TypeError):
        return None  # an unknown kind of ownerReference: Events go to the pod alone
