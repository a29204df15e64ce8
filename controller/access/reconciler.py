# SPDX-License-Identifier: Apache-2.0
"""Gives jobs their access as their pods come and go, and looks at all of them now and then.

Every replica does it: what one has done, the others find done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime

from controller.access.executor import AccessExecutor
from controller.access.jobs import JobsWithPods
from controller.access.names import JobName
from rdzv.errors import MusterError

log = logging.getLogger(__name__)

LOOK_S = 60.0
"""Between two looks at every job: a Secret that somebody has changed or deleted, or a store that
was restored, is noticed by then; each job costs four calls of the store and one of the API
server."""
AGAIN_S = 5.0
"""After the store or the API server refused, or was away."""
AT_ONCE = 8
"""Jobs that are looked at at the same time."""


class AccessReconciler:
    """Reconciles a job's access as soon as its pods come or go, and all others every ``LOOK_S``."""

    def __init__(
        self, executor: AccessExecutor, jobs: JobsWithPods, now: Callable[[], datetime]
    ) -> None:
        self._executor = executor
        self._jobs = jobs
        self._now = now
        self._due: set[JobName] = set()
        self._stirred = asyncio.Event()
        jobs.changed = self.stir

    def stir(self, job: JobName) -> None:
        """Have a job looked at now."""
        self._due.add(job)
        self._stirred.set()

    async def run(self) -> None:
        """Go on until cancelled."""
        await self._jobs.known.wait()
        loop = asyncio.get_running_loop()
        look_s = loop.time()
        limit = asyncio.Semaphore(AT_ONCE)
        while True:
            self._stirred.clear()
            due, self._due = self._due, set()
            if loop.time() >= look_s:
                due |= self._jobs.all() | await self._known_to_the_store()
                look_s = loop.time() + LOOK_S
            async with asyncio.TaskGroup() as tasks:
                for job in sorted(due):
                    tasks.create_task(self._look_at(job, limit))
            wait_s = AGAIN_S if self._due else look_s - loop.time()
            try:
                async with asyncio.timeout(max(wait_s, 0.0)):
                    await self._stirred.wait()
            except TimeoutError:
                continue  # it is time to look, or to try again

    async def _known_to_the_store(self) -> frozenset[JobName]:
        try:
            return await self._executor.jobs()
        except MusterError as error:
            log.warning("access: %s", error, extra={"event": "access_not_given"})
            return frozenset()

    async def _look_at(self, job: JobName, limit: asyncio.Semaphore) -> None:
        async with limit:
            try:
                until = await self._executor.bring_in_line(job)
            except MusterError as error:
                log.warning("access of %s: %s", job, error, extra={"event": "access_not_given"})
                self._due.add(job)
                return
            except Exception as error:  # one job's Secret must not take all others' access along
                told = {"event": "defect"}
                log.critical("access of %s: %s", job, error, exc_info=error, extra=told)
                return
        if until is not None:
            left_s = (until - self._now()).total_seconds()
            if left_s < LOOK_S:
                asyncio.get_running_loop().call_later(max(left_s, 0.0), self.stir, job)
