# SPDX-License-Identifier: Apache-2.0
"""The object that created a job's pods: read periodically, remembered after the pods are gone."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from controller.cluster import paths
from controller.cluster.api import ClusterApi
from controller.cluster.collection import Collection
from controller.cluster.events import reference
from controller.jobs.state import JobState
from controller.owners.annotations import PREFIX
from controller.owners.pods import PodSeen, pod_of, time_to_save_s
from controller.owners.scale import is_autoscaled, replicas_of
from rdzv.errors import ClusterRefused, ClusterUnavailable
from rdzv.keys import JobKeys

log = logging.getLogger(__name__)

FRESH_S = 30.0
"""Time for which a read owner is used; it may be scaled, or replaced by one of the same name."""
READ_TIMEOUT_S = 2.0
UNREAD_S = 60.0
"""Time for which the Events of an owner that was never read wait for it; then they are published
at the owner that the pod shows. Longer: an owner that cannot be read holds back its Events, and
the leader's stored progress. Shorter: while an API server restarts, they go to a ReplicaSet, where
nobody looks."""
KEPT = 4000

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
        about = {
            "apiVersion": owner.api_version,
            "kind": owner.kind,
            "name": owner.name,
            "namespace": pod.namespace,
            "uid": found["metadata"]["uid"],
        }
        notes = found["metadata"].get("annotations") or {}
        return OwnerSeen(
            about,
            self._clock(),
            path,
            replicas_of({"apiVersion": owner.api_version, "kind": owner.kind, **found}),
            {key: str(value) for key, value in notes.items() if key.startswith(PREFIX)},
            is_autoscaled(found["metadata"]),
        )


def _keep_newest(kept: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > KEPT:
        kept.popitem(last=False)
