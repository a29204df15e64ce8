# SPDX-License-Identifier: Apache-2.0
"""The reduced view of a pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controller.admission.owner import Owner, owner_of
from controller.cluster.api import Object
from controller.jobs.state import JobState
from injection import sidecar
from injection.job_label import job_label
from injection.settings import LABEL, TABLE
from launcher_shim.pod.hold import DEFAULT_GRACE_S, reserve_s
from rdzv.errors import ConfigError
from rdzv.keys import JobKeys

PREEMPTED = "PreemptionByScheduler"
"""Reason of the condition DisruptionTarget: the scheduler ends the pod to make room."""


@dataclass(frozen=True, slots=True)
class PodSeen:
    """The kept fields of one pod.

    ``owner``: the object with whose life the job's ends. ``maker``: the ownerReference of the
    object that created the pod itself. ``disruption``: why Kubernetes is about to end it, from its
    condition; empty without one. ``preempted``: that is to make room for a pod of a higher
    priority. ``tolerates``: keys of the taints that it tolerates. ``deleted``:
    whether its termination has begun. ``job``: its job's name, as a label has it. ``unplaced``:
    whether the scheduler has found no node for it. ``grace_s``: its termination grace.
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
    grace_s: float = DEFAULT_GRACE_S

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
        job=_job(pod),
        unplaced=not metadata.get("deletionTimestamp")
        and any(
            (one.get("type"), one.get("reason")) == ("PodScheduled", "Unschedulable")
            and one.get("status") == "False"
            for one in conditions
        ),
        grace_s=float(spec.get("terminationGracePeriodSeconds") or DEFAULT_GRACE_S),
    )


def pod_of(pods: Mapping[str, PodSeen], keys: JobKeys, name: str, uid: str) -> PodSeen | None:
    """Return the pod that a record of a job names; None unless the pod itself agrees.

    The job writes its records, so a record may name any pod of the cluster: it speaks for the
    job's own pods alone. ``pods`` are by UID; ``name`` is the member's.
    """
    found = pods.get(uid)
    if found is None or (found.namespace, found.name) != (keys.namespace, name):
        return None
    return found if found.job == job_label(keys.job_name) else None


def time_to_save_s(pods: Mapping[str, PodSeen], state: JobState) -> float | None:
    """Return what the job's pod with the shortest grace has for a save; None if none is seen."""
    members = state.snapshot.members.values()
    own = (pod_of(pods, state.keys, one.name, one.pod_uid) for one in members)
    shortest_s = min((pod.grace_s for pod in own if pod is not None), default=0.0)
    return max(0.0, shortest_s - reserve_s(shortest_s)) if shortest_s else None


def _job(pod: Object) -> str:
    """Return the name of the sidecar's job, as a label has it: by its variable, else the label."""
    labels = pod["metadata"].get("labels") or {}
    named = {"value": labels.get(LABEL, "")}
    for container in (pod.get("spec") or {}).get("initContainers") or []:
        if container.get("name") == sidecar.NAME:
            variables = {one.get("name"): one for one in container.get("env") or []}
            named = variables.get(TABLE["job"].variable, named)
    if path := ((named.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath"):
        read = str(path).removeprefix("metadata.labels['").removesuffix("']")
        named = {"value": labels.get(read, "")}
    job = str(named.get("value") or "")
    return job and job_label(job)


def _owner(pod: Object) -> Owner | None:
    try:
        return owner_of(pod)
    except (ConfigError, KeyError, TypeError):
        return None  # an unknown kind of ownerReference: Events go to the pod alone
