# SPDX-License-Identifier: Apache-2.0
"""The object that a job's pods were made by: read once in a while, remembered when they go."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from controller.cluster import paths
from controller.cluster.api import ClusterApi, Object
from controller.cluster.collection import Collection
from controller.cluster.events import reference
from controller.jobs.state import JobState
from controller.owners.pods import PodSeen
from rdzv.errors import ClusterError, ClusterRefused
from rdzv.keys import JobKeys

log = logging.getLogger(__name__)

FRESH_S = 30.0
"""What was read is good for so long; it may be scaled, or made again under its name."""
READ_TIMEOUT_S = 2.0
KEPT = 4000


@dataclass(frozen=True, slots=True)
class OwnerSeen:
    """An owner: what an Event says of it, where it is, and the object where it could be read."""

    reference: Mapping[str, Any]
    path: str | None
    found: Object | None
    read_s: float


class Owners:
    """Owners of jobs, by the pods that their members are. ``clock`` is monotonic, in seconds."""

    def __init__(
        self, api: ClusterApi, pods: Collection[PodSeen], clock: Callable[[], float]
    ) -> None:
        self._api = api
        self._pods = pods
        self._clock = clock
        self._of_jobs: OrderedDict[JobKeys, OwnerSeen] = OrderedDict()
        self._gone: OrderedDict[str, PodSeen] = OrderedDict()

    def pod(self, uid: str) -> PodSeen | None:
        """A pod by its UID, also one that has just gone."""
        found = self._pods.items.get(uid)
        if found is None:
            return self._gone.get(uid)
        self._gone[uid] = found
        self._gone.move_to_end(uid)
        while len(self._gone) > KEPT:
            self._gone.popitem(last=False)
        return found

    async def of(self, state: JobState) -> OwnerSeen | None:
        """What made the job's pods; None where nothing did, or nobody knows any more."""
        keys = state.keys
        uids = [one.pod_uid for one in state.snapshot.members.values()]
        seen = next((pod for uid in uids if (pod := self.pod(uid)) is not None), None)
        known = self._of_jobs.get(keys)
        if seen is None or seen.maker is None:
            return known
        if known is not None and self._clock() - known.read_s < FRESH_S:
            return known
        self._of_jobs[keys] = await self._read(seen, seen.maker)
        self._of_jobs.move_to_end(keys)
        while len(self._of_jobs) > KEPT:
            self._of_jobs.popitem(last=False)
        return self._of_jobs[keys]

    async def _read(self, pod: PodSeen, maker: Mapping[str, Any]) -> OwnerSeen:
        owner = pod.owner
        as_shown = OwnerSeen(reference(maker, pod.namespace), None, None, self._clock())
        if owner is None:
            return as_shown
        path = paths.owner(owner.api_version, owner.kind, pod.namespace, owner.name)
        if path is None:
            return as_shown
        try:
            found = await self._api.get(path, READ_TIMEOUT_S)
        except ClusterError as error:
            # Without the right to, what the pod shows has to do: its ReplicaSet, for one.
            level = logging.DEBUG if isinstance(error, ClusterRefused) else logging.WARNING
            log.log(level, "cannot read %s %s: %s", owner.kind, owner.name, error)
            return as_shown
        about = {
            "apiVersion": owner.api_version,
            "kind": owner.kind,
            "name": owner.name,
            "namespace": pod.namespace,
            "uid": found["metadata"]["uid"],
        }
        return OwnerSeen(about, path, found, self._clock())
