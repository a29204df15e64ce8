# SPDX-License-Identifier: Apache-2.0
"""Reconciles the jobs' access when their pods come or go, and every job periodically.

Every replica does so: a step that one of them has taken needs nothing from the others.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from datetime import datetime

from controller.access.executor import AccessExecutor
from controller.access.jobs import JobsWithPods
from controller.access.names import JobName
from rdzv.diary import Diary
from rdzv.errors import ClusterRefused, MusterError, StoreRefused
from rdzv.reconcile import Loop, Outlook
from rdzv.store.backoff import Doubling

log = logging.getLogger(__name__)

LOOK_S = 60.0
"""Interval between two checks of every job: the bound on how late a changed or deleted Secret, or
a restored store, is noticed. A check costs at least three calls to the store and one to the API
server per job."""
AGAIN_S = 5.0
"""Retry interval if the store or the API server is unavailable."""
REFUSED = Doubling(AGAIN_S, LOOK_S)
"""Backoff after either has refused a call, which ends only once somebody acts: at most the
interval of the periodic check. A job whose pods come or go is checked at once."""
AT_ONCE = 8
"""Maximum number of jobs that are checked concurrently."""


class AccessReconciler(Loop):
    """The reconciler of access: of a job as its pods come or go, of all jobs every ``LOOK_S``."""

    def __init__(
        self, executor: AccessExecutor, jobs: JobsWithPods, now: Callable[[], datetime]
    ) -> None:
        super().__init__()
        self._executor = executor
        self._jobs = jobs
        self._now = now
        self._due: set[JobName] = set()
        self._again: dict[JobName, tuple[float, int]] = {}
        """Jobs whose check failed: the time of the next retry, and the number of refusals in a
        row."""
        self._diaries: dict[JobName, Diary] = {}
        self._look_s = -math.inf
        """The time of the next check of all jobs."""
        self._limit = asyncio.Semaphore(AT_ONCE)
        jobs.changed = self.stir

    def stir(self, job: JobName) -> None:
        """Request an immediate check of ``job``."""
        self._due.add(job)
        self.wake()

    async def run(self) -> None:
        """Reconcile jobs until cancelled."""
        await self._jobs.known.wait()
        await super().run()

    async def step(self) -> Outlook:
        """Check the jobs that are due."""
        due, self._due = self._due, set()
        if self.clock() >= self._look_s:
            every = self._jobs.all() | await self._known_to_the_store()
            due |= every - self._again.keys()
            self._look_s = self.clock() + LOOK_S
        due |= {job for job, (due_s, _) in self._again.items() if due_s <= self.clock()}
        async with asyncio.TaskGroup() as tasks:
            for job in sorted(due):
                tasks.create_task(self._look_at(job))
        return Outlook(look_at_s=min([self._look_s, *(due_s for due_s, _ in self._again.values())]))

    async def _known_to_the_store(self) -> frozenset[JobName]:
        try:
            return await self._executor.jobs()
        except MusterError as error:
            log.warning(
                "cannot list or clean up the store's users and roles: %s",
                error,
                extra={"event": "access_not_given"},
            )
            return frozenset()

    async def _look_at(self, job: JobName) -> None:
        async with self._limit:
            try:
                until = await self._executor.bring_in_line(job)
            except MusterError as error:
                self._note(job, error)
                return
            except Exception as error:  # one job's failure must not affect the access of others
                told = {"event": "defect"}
                log.critical("access of %s: %s", job, error, exc_info=error, extra=told)
                _, before = self._again.get(job, (0.0, 0))
                self._again[job] = (self.clock() + LOOK_S, before)
                return
        self._again.pop(job, None)
        self._diaries.pop(job, None)
        if until is not None:
            left_s = (until - self._now()).total_seconds()
            if left_s < LOOK_S:
                asyncio.get_running_loop().call_later(max(left_s, 0.0), self.stir, job)

    def _note(self, job: JobName, error: MusterError) -> None:
        """Log the error once and schedule a retry, with backoff if a call was refused."""
        diary = self._diaries.setdefault(job, Diary(log))
        told = {"event": "access_not_given"}
        diary.say(f"access of {job}: {error}", level=logging.WARNING, extra=told)
        refused = isinstance(error, ClusterRefused | StoreRefused)
        _, before = self._again.get(job, (0.0, 0))
        again_s = REFUSED.after(before) if refused else AGAIN_S
        due_s = self.clock() + again_s
        self._again[job] = (due_s, before + 1 if refused else before)
