# SPDX-License-Identifier: Apache-2.0
"""The pods of jobs and the objects that created them, in reduced views.

An owner is read periodically, remembered after the pods are gone, and annotated for schedulers and
people.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from controller.cluster import paths
from controller.cluster.api import ClusterApi, Object
from controller.cluster.collection import Collection
from controller.cluster.events import reference
from controller.jobs import JobState
from controller.owner_kinds import Owner, is_autoscaled, owner_of, replicas_of
from injection import sidecar
from injection.kinds import job_label
from injection.settings import LABEL, TABLE
from launcher_shim.pod.hold import DEFAULT_GRACE_S, reserve_s
from rdzv.errors import ClusterRefused, ClusterUnavailable, ConfigError
from rdzv.keys import JobKeys

log = logging.getLogger(__name__)

PREEMPTED = "PreemptionByScheduler"
"""Reason of the condition DisruptionTarget: the scheduler ends the pod to make room."""

PREFIX = "muster.dev/"
EVERY_S = 30.0
"""Minimum interval between two writes to one owner. Shorter: more writes to the API server, each
of which goes to every watcher of that object."""

FRESH_S = 30.0
"""Time for which a read owner is used; it may be scaled, or replaced by one of the same name."""
READ_TIMEOUT_S = 2.0
UNREAD_S = 60.0
"""Time for which the Events of an owner that was never read wait for it; then they are published
at the owner that the pod shows. Longer: an owner that cannot be read holds back its Events, and
the leader's stored progress. Shorter: while an API server restarts, they go to a ReplicaSet, where
nobody looks."""
KEPT = 4000


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
        own = {"apiVersion": "v1", "kind": "Pod", "name": self.name, "uid": self.uid}
        return reference(own, self.namespace)


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


def annotations_of(job: JobState) -> dict[str, str]:
    """Return the annotations that describe a job's state."""
    record, last = job.snapshot.job, job.snapshot.commit_to_start_from
    found: dict[str, str] = {}
    if record is not None:
        found[f"{PREFIX}members-wanted"] = str(record.desired or record.policy.max_nodes)
        found[f"{PREFIX}members-there"] = str(len(job.listing.listed))
    if last is not None:
        found[f"{PREFIX}last-commit-step"] = str(last.step)
        if last.at_unix_s:
            at = datetime.fromtimestamp(last.at_unix_s, UTC).isoformat(timespec="seconds")
            found[f"{PREFIX}last-commit-time"] = at.replace("+00:00", "Z")
    return found


def due_s(now: float, wanted: dict[str, str], held: dict[str, str], written_s: float) -> float:
    """Return the seconds until ``wanted`` is to be written; inf if ``held`` is equal."""
    if wanted == held:
        return float("inf")
    return max(0.0, written_s + EVERY_S - now)


Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class OwnerSeen:
    """The kept fields of an owner; the whole object may have 100 KB.

    ``reference``: its object reference for Events. ``path``: its path in the API; None if it could
    not be read. ``replicas``: as ``replicas_of``. ``annotations``: those of ``PREFIX``.
    ``autoscaled``: whether a HorizontalPodAutoscaler has set the replicas.
    """

    reference: Mapping[str, Any]
    read_s: float
    path: str | None = None
    replicas: int | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)
    autoscaled: bool = False


class Owners:
    """Owners of jobs, by the pods of their members. ``clock`` is monotonic, in seconds."""

    def __init__(
        self, api: ClusterApi, pods: Collection[PodSeen], clock: Callable[[], float]
    ) -> None:
        self._api = api
        self._pods = pods
        self._clock = clock
        self._of_jobs: OrderedDict[JobKeys, OwnerSeen] = OrderedDict()
        self._unread_since_s: OrderedDict[JobKeys, float] = OrderedDict()
        self._gone: OrderedDict[str, PodSeen] = OrderedDict()

    def pod(self, keys: JobKeys, name: str, uid: str) -> PodSeen | None:
        """Return the job's pod that a record names, also if it is gone already."""
        found = pod_of(self._pods.items, keys, name, uid)
        if found is None:
            return pod_of(self._gone, keys, name, uid)
        _keep_newest(self._gone, uid, found)
        return found

    def time_to_save_s(self, state: JobState) -> float | None:
        """Return what the pod with the shortest grace has for a save; None if none is seen."""
        return time_to_save_s(self._pods.items, state)

    async def of(self, state: JobState, *, again: bool = False) -> OwnerSeen | None:
        """Return the object that created the job's pods; None if there is none, or it is forgotten.

        ``again``: read it whatever copy there is.
        Raises ``ClusterUnavailable`` if there is no fresh copy, and it cannot be read now.
        """
        keys, seen = state.keys, self._pod_of(state)
        known = self._of_jobs.get(keys)
        if seen is None or seen.maker is None:
            return known
        if known is not None and not again and self._clock() - known.read_s < FRESH_S:
            return known
        _keep_newest(self._of_jobs, keys, await self._read(seen, seen.maker))
        self._unread_since_s.pop(keys, None)
        return self._of_jobs[keys]

    async def reference(self, state: JobState) -> Mapping[str, Any] | None:
        """Return the owner's object reference for Events; None as with ``of``.

        While the owner cannot be read, it is the last one that was read. If none ever was, this
        raises ``ClusterUnavailable`` for the first ``UNREAD_S``, and then returns what the pod
        shows.
        """
        keys = state.keys
        try:
            owner = await self.of(state)
        except ClusterUnavailable:
            owner, now = self._of_jobs.get(keys), self._clock()
            if owner is None:
                since_s = self._unread_since_s.get(keys, now)
                _keep_newest(self._unread_since_s, keys, since_s)
                seen = self._pod_of(state)
                if now - since_s < UNREAD_S or seen is None or seen.maker is None:
                    raise
                return reference(seen.maker, seen.namespace)
        return None if owner is None else owner.reference

    def _pod_of(self, state: JobState) -> PodSeen | None:
        named = [(one.name, one.pod_uid) for one in state.snapshot.members.values()]
        pods = (self.pod(state.keys, name, uid) for name, uid in named)
        return next((pod for pod in pods if pod is not None), None)

    async def _read(self, pod: PodSeen, maker: Mapping[str, Any]) -> OwnerSeen:
        owner = pod.owner
        as_shown = OwnerSeen(reference(maker, pod.namespace), self._clock())
        if owner is None:
            return as_shown
        path = paths.owner(owner.api_version, owner.kind, pod.namespace, owner.name)
        if path is None:
            return as_shown
        try:
            found = await self._api.get(path, READ_TIMEOUT_S)
        except ClusterRefused as error:
            # Without the permission, use what the pod shows, such as its ReplicaSet.
            log.debug("cannot read %s %s: %s", owner.kind, owner.name, error)
            return as_shown
        except ClusterUnavailable as error:
            log.warning("cannot read %s %s: %s", owner.kind, owner.name, error)
            raise
        kind = {"apiVersion": owner.api_version, "kind": owner.kind}
        about = {**kind, "name": owner.name, "uid": found["metadata"]["uid"]}
        notes = found["metadata"].get("annotations") or {}
        return OwnerSeen(
            reference(about, pod.namespace),
            self._clock(),
            path,
            replicas_of({**kind, **found}),
            {key: str(value) for key, value in notes.items() if key.startswith(PREFIX)},
            is_autoscaled(found["metadata"]),
        )


def _keep_newest(kept: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > KEPT:
        kept.popitem(last=False)
