# SPDX-License-Identifier: Apache-2.0
"""Publishes the events of jobs as Kubernetes Events while this replica leads."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from controller.cluster.events import Events
from controller.cluster.series import told_up_to
from controller.defect import tell_defect
from controller.events.job_events import WARNINGS, JobEvent, job_events
from controller.jobs.jobs import Jobs
from controller.jobs.state import JobState
from controller.leader.leadership import Leadership
from controller.owners.owners import Owners
from rdzv.errors import ClusterUnavailable
from rdzv.keys import JobKeys
from rdzv.reconcile import Loop, Outlook

OWNER_RETRY_S = 5.0
"""Retry interval for reading an owner that its Events wait for."""
GATHER_S = 0.2
"""Delay to batch changes: a world that forms changes dozens of keys at once."""


class EventReporter(Loop):
    """The publisher of all jobs' events; reports its progress to ``leadership`` as a revision."""

    def __init__(self, jobs: Jobs, owners: Owners, events: Events, leadership: Leadership) -> None:
        super().__init__()
        self._jobs = jobs
        self._owners = owners
        self._events = events
        self._leadership = leadership
        self._before: dict[JobKeys, JobState] = {}
        self._from = 0
        """The revision from which on this leader publishes."""

    async def run(self) -> None:
        """Publish Events until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._events.run())
            await self._jobs.changed_after(0)
            self._from = self._since()
            await super().run()

    async def step(self) -> Outlook:
        """Publish what has changed; note up to which revision that is all."""
        sequence, revision = self._jobs.sequence, self._jobs.mirror.certain_revision
        for keys in [keys for keys in self._before if not self._jobs.has(keys)]:
            del self._before[keys]
        all_told = True
        for keys, state in self._jobs.states().items():
            if self._before.get(keys) is not state:
                all_told = await self._tell_of(state, self._from) and all_told
        if all_told:
            self._leadership.progress = partial(self._told, revision)
        look_at_s = math.inf if all_told else self.clock() + OWNER_RETRY_S
        changed = partial(self._jobs.changed_after, sequence)
        return Outlook(changed, look_at_s, gather_s=GATHER_S)

    def _since(self) -> int:
        """Return the revision to publish from: the former leader's, else the current one."""
        now, told = self._jobs.mirror.certain_revision, self._leadership.told
        # A store that was restored from a backup may be behind that progress.
        return now if told is None or told > now else told

    async def _tell_of(self, state: JobState, since: int) -> bool:
        """Publish the Events of one job; return False if its owner cannot be read yet.

        If a defect occurs, only this job loses these Events.
        """
        before = self._before.get(state.keys)
        try:
            await self._tell(before, state, since)
        except ClusterUnavailable:
            return False
        except Exception as error:
            job = state.keys.job_name
            tell_defect(f"cannot publish the newest Events of job {job}: {error}", error)
        self._before[state.keys] = state
        return True

    async def _tell(self, before: JobState | None, state: JobState, since: int) -> None:
        new = job_events(before, state, since, self._owners.time_to_save_s(state))
        of_job = any(one.of_job for one in new)
        owner = await self._owners.reference(state) if of_job else None
        for one in new:
            pod = self._owners.pod(state.keys, one.pod, one.pod_uid)
            if pod is not None:
                self._say(pod.reference, one)
            if owner is not None and one.of_job:
                self._say(owner, one)

    def _told(self, revision: int) -> int:
        return told_up_to(revision, self._events.series)

    def _say(self, about: Mapping[str, Any], one: JobEvent) -> None:
        warning = one.reason in WARNINGS
        self._events.say(about, one.reason, one.message, revision=one.revision, warning=warning)
