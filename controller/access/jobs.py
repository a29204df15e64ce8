# SPDX-License-Identifier: Apache-2.0
"""The jobs whose pods use the controller's Secrets, according to the API server.

Requests to the webhook do not count: anybody in the cluster can send one, and could have Secrets
created in any namespace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import quote

from controller.access.names import NAMED_AFTER, RELEASE, JobName, is_a_name, secret_name
from controller.cluster.api import ClusterApi, Object
from controller.cluster.collection import Collection
from injection.settings import LABEL, annotation
from rdzv.reconcile import Loop, Outlook

GATHER_S = 0.1
"""Delay to batch changes: pods of one job come together."""


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


class JobsWithPods(Loop):
    """The jobs of a release that have pods.

    ``changed`` is called with a job when its first pod comes and when its last one goes.
    """

    def __init__(self, api: ClusterApi, release: str = "") -> None:
        super().__init__()
        self.changed: Callable[[JobName], None] = lambda job: None
        self.known = asyncio.Event()
        """Set after the first complete list; before, the absence of a job's pods proves nothing."""
        of_pod = partial(job_of_pod, release=release)
        self._pods = Collection(api, _PODS, of_pod, metadata=True)
        self._jobs: frozenset[JobName] = frozenset()

    def __contains__(self, job: JobName) -> bool:
        return job in self._jobs

    def all(self) -> frozenset[JobName]:
        """Return every job that has a pod."""
        return self._jobs

    async def run(self) -> None:
        """Follow the pods until cancelled."""
        async with self._pods.following():
            await self._pods.changed_after(0)
            await super().run()

    async def step(self) -> Outlook:
        """Call ``changed`` with the jobs that have come or gone."""
        sequence = self._pods.sequence
        before, self._jobs = self._jobs, frozenset(self._pods.items.values())
        self.known.set()
        for job in before ^ self._jobs:
            self.changed(job)
        return Outlook(partial(self._pods.changed_after, sequence), gather_s=GATHER_S)


_PODS = f"/api/v1/pods?labelSelector={quote(LABEL)}"
