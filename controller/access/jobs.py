# SPDX-License-Identifier: Apache-2.0
"""The jobs whose pods use the controller's Secrets, according to the API server.

Requests to the webhook do not count: anybody in the cluster can send one, and could have Secrets
created in any namespace.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from controller.access.names import NAMED_AFTER, RELEASE, JobName, is_a_name, secret_name
from controller.cluster.api import ClusterApi, Object
from controller.cluster.watching import AGAIN_FIRST_S, AGAIN_MOST_S
from injection.settings import LABEL, annotation
from rdzv.errors import ClusterError, ClusterRefused

log = logging.getLogger(__name__)

PAGE = 500
"""Number of pods per page of a list."""
METADATA = "application/json;as=PartialObjectMetadata{};g=meta.k8s.io;v=v1"
"""The media type that asks for the metadata of pods only."""


def job_of_pod(pod: Object, release: str = "") -> JobName | None:
    """Return a pod's job if the pod uses the Secret that ``release`` keeps of that job, else None.

    A pod that names no release got its reference to the Secret from a person.
    """
    metadata = pod.get("metadata") or {}
    notes: dict[str, Any] = metadata.get("annotations") or {}
    said = notes.get(annotation("job")) or notes.get(NAMED_AFTER)
    job = said or (metadata.get("labels") or {}).get(LABEL)
    # Any user may put any text into a pod: a name that no job can have gets nothing.
    if not job or not is_a_name(str(job)):
        return None
    if notes.get(annotation("etcd_secret")) != secret_name(str(job)):
        return None
    if notes.get(RELEASE, release) != release:
        return None
    return JobName(str(metadata.get("namespace")), str(job))


class JobsWithPods:
    """The jobs of a release that have pods, by one list and one watch.

    ``changed`` is called with a job when its first pod comes and when its last one goes.
    """

    def __init__(self, api: ClusterApi, release: str = "") -> None:
        self.changed: Callable[[JobName], None] = lambda job: None
        self.known = asyncio.Event()
        """Set after the first complete list; before, the absence of a job's pods proves nothing."""
        self._api = api
        self._release = release
        self._pods: dict[str, JobName] = {}
        self._counts: dict[JobName, int] = {}

    def __contains__(self, job: JobName) -> bool:
        return job in self._counts

    def all(self) -> frozenset[JobName]:
        """Return every job that has a pod."""
        return frozenset(self._counts)

    async def run(self) -> None:
        """List and watch the pods until cancelled."""
        again_s = AGAIN_FIRST_S
        while True:
            try:
                version = await self._list()
                again_s = AGAIN_FIRST_S
                await self._follow(version)
            except ClusterError as error:
                if isinstance(error, ClusterRefused) and error.status == 410:
                    continue
                log.warning(
                    "cannot list or watch pods, retrying: %s",
                    error,
                    extra={"event": "cluster_unavailable"},
                )
                await asyncio.sleep(again_s)
                again_s = min(2 * again_s, AGAIN_MOST_S)

    async def _list(self) -> str:
        found: dict[str, JobName] = {}
        token = ""
        while True:
            path = f"{_PODS}&limit={PAGE}" + (f"&continue={quote(token)}" if token else "")
            page = await self._api.get(path, accept=METADATA.format("List"))
            for pod in page.get("items") or []:
                if (job := job_of_pod(pod, self._release)) is not None:
                    found[pod["metadata"]["uid"]] = job
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                break
        for uid in self._pods.keys() - found.keys():
            self._gone(uid)
        for uid, job in found.items():
            self._there(uid, job)
        self.known.set()
        return str((page.get("metadata") or {}).get("resourceVersion", ""))

    async def _follow(self, version: str) -> None:
        while True:
            yielded = False
            async for event in self._api.watch(_PODS, version, accept=METADATA.format("")):
                yielded = True
                pod = event.get("object") or {}
                metadata = pod.get("metadata") or {}
                version = str(metadata.get("resourceVersion", version))
                uid = str(metadata.get("uid", ""))
                if event.get("type") == "DELETED":
                    self._gone(uid)
                elif (
                    event.get("type") != "BOOKMARK"
                    and (job := job_of_pod(pod, self._release)) is not None
                ):
                    self._there(uid, job)
            if not yielded:
                await asyncio.sleep(AGAIN_FIRST_S)

    def _there(self, uid: str, job: JobName) -> None:
        if uid in self._pods:
            return
        self._pods[uid] = job
        self._counts[job] = self._counts.get(job, 0) + 1
        if self._counts[job] == 1:
            self.changed(job)

    def _gone(self, uid: str) -> None:
        job = self._pods.pop(uid, None)
        if job is None:
            return
        self._counts[job] -= 1
        if not self._counts[job]:
            del self._counts[job]
            self.changed(job)


_PODS = f"/api/v1/pods?labelSelector={quote(LABEL)}"
