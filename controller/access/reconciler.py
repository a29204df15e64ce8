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
from rdzv.diary import Diary
from rdzv.errors import ClusterRefused, MusterError, StoreRefused
from rdzv.store.backoff import Doubling

log = logging.getLogger(__name__)

LOOK_S = 60.0
"""Between two looks at every job: a Secret that somebody has changed or deleted, or a store that
was restored, is noticed by then; each job costs four calls of the store and one of the API
server."""
AGAIN_S = 5.0
"""After the store or the API server was away."""
REFUSED = Doubling(AGAIN_S, LOOK_S)
"""After either has refused, which ends only when somebody does something: in the end no more often
than any other job is looked at. One whose pods come or go is looked at at once."""
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
        self._again: dict[JobName, tuple[float, int]] = {}
        """Those that failed: when each is due again, and how often in a row it was refused."""
        self._diaries: dict[JobName, Diary] = {}
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
                every = self._jobs.all() | await self._known_to_the_store()
                due |= every - self._again.keys()
                look_s = loop.time() + LOOK_S
            due |= {job for job, (due_s, _) in self._again.items() if due_s <= loop.time()}
            async with asyncio.TaskGroup() as tasks:
                for job in sorted(due):
                    tasks.create_task(self._look_at(job, limit))
            next_s = min([look_s, *(due_s for due_s, _ in self._again.values())])
            try:
                async with asyncio.timeout(max(next_s - loop.time(), 0.0)):
                    await self._stirred.wait()
            except TimeoutError:
                continue  # it is time to look, or to try again

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

    async def _look_at(self, job: JobName, limit: asyncio.Semaphore) -> None:
        async with limit:
            try:
                until = await self._executor.bring_in_line(job)
            except MusterError as error:
                self._note(job, error)
                return
            except Exception as error:  # one job's Secret must not take all others' access along
                told = {"event": "defect"}
                log.critical("access of %s: %s", job, error, exc_info=error, extra=told)
                _, before = self._again.get(job, (0.0, 0))
                self._again[job] = (asyncio.get_running_loop().time() + LOOK_S, before)
                return
        self._again.pop(job, None)
        self._diaries.pop(job, None)
        if until is not None:
            left_s = (until - self._now()).total_seconds()
            if left_s < LOOK_S:
                asyncio.get_running_loop().call_later(max(left_s, 0.0), self.stir, job)

    def _note(self, job: JobName, error: MusterError) -> None:
        """Say what is wrong once, and try again the later the longer it is."""
        diary = self._diaries.setdefault(job, Diary(log))
        told = {"event": "access_not_given"}
        diary.say(f"access of {job}: {error}", level=logging.WARNING, extra=told)
        refused = isinstance(error, ClusterRefused | StoreRefused)
        _, before = self._again.get(job, (0.0, 0))
        again_s = REFUSED.after(before) if refused else AGAIN_S
        due_s = asyncio.get_running_loop().time() + again_s
        self._again[job] = (due_s, before + 1 if refused else before)
