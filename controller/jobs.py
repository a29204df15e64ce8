# SPDX-License-Identifier: Apache-2.0
"""All jobs of one store, each at one revision, kept current by one watch; read-only."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from rdzv.errors import RecordError
from rdzv.job import Watching
from rdzv.keys import ROOT, JobKeys, job_of
from rdzv.membership import Membership
from rdzv.mirror import Mirror, spelled_of_any_job
from rdzv.reconcile import log_defect
from rdzv.records.job import HistoryEntry
from rdzv.snapshot import Listing, Snapshot
from rdzv.store import KeyValue, Store, WatchEvent

_READ = re.compile(
    r"[^/]+/[^/]+/(?:(?:job|last_commit|g/[0-9]+/commit|g/[0-9]+/c10d/[^/]+/round)$"
    r"|(?:incarnations|history|g/[0-9]+/(?:members|drains|quarantines))/)"
)
"""The keys that make up the jobs' states, without ``ROOT``. Most of a store is the data of
launchers, and reports that pods write every few seconds."""


@dataclass(frozen=True, slots=True)
class JobState:
    """A job as of one revision; immutable.

    ``revision`` is the store's; ``history`` and ``rounds`` are unparsed.
    """

    keys: JobKeys
    revision: int
    snapshot: Snapshot
    listing: Listing
    history: tuple[KeyValue, ...] = field(default=(), repr=False)
    rounds: tuple[KeyValue, ...] = field(default=(), repr=False)

    def entries_after(self, revision: int) -> list[HistoryEntry]:
        """Return the history entries that were written after ``revision``, the oldest first.

        Entries that cannot be parsed are left out.
        """
        found = []
        for kv in self.history:
            if kv.mod_revision > revision:
                try:
                    found.append(HistoryEntry.from_kv(kv))
                except RecordError:
                    continue
        return sorted(found, key=lambda entry: entry.revision)


class _Job:
    """One job's part of the mirror."""

    def __init__(self, keys: JobKeys, clock: Callable[[], float]) -> None:
        self.mirror = Mirror(keys.prefix, clock)
        self._membership = Membership(keys, self.mirror)
        self._state: JobState | None = None
        self._defective = False

    def apply(self, events: Sequence[WatchEvent]) -> None:
        # A read delivers events by key; sort by revision, as the last one becomes the mirror's.
        events = sorted(events, key=lambda event: event.kv.mod_revision)
        self.mirror.apply(events, events[-1].kv.mod_revision)
        self._state, self._defective = None, False

    def state(self) -> JobState | None:
        """Return the current state; None if its records cannot be read, until they change."""
        if self._state is None and not self._defective:
            try:
                self._state = self._read()
            except Exception as error:  # one job's records must not affect other jobs
                self._defective = True
                job = self._membership.keys.job_name
                log_defect(f"ignoring job {job}, cannot read its records: {error}", error)
        return self._state

    def _read(self) -> JobState:
        keys = self._membership.keys
        return JobState(
            keys,
            self.mirror.certain_revision,
            self._membership.snapshot(),
            self._membership.listing(),
            tuple(self.mirror.under(keys.history)),
            tuple(kv for key, kv in self.mirror.kvs.items() if key.endswith("/round")),
        )


class Jobs:
    """Every job below the root of a store, as of the watch's position.

    ``clock`` is monotonic, in seconds. A job's state is the same object until the job changes.
    ``sequence`` grows with the first read, and whenever a state changes.
    """

    def __init__(self, store: Store, clock: Callable[[], float], random: Random) -> None:
        self.store = store
        self.mirror = Mirror(ROOT, clock, spelled_of_any_job, _READ.match)
        self.watching = Watching(store, self.mirror, random=random, gathers=True)
        self._clock = clock
        self._jobs: dict[JobKeys, _Job] = {}
        self._changes = 0
        self._changed = asyncio.Event()
        self.mirror.subscribe(self._apply)

    @asynccontextmanager
    async def following(self) -> AsyncIterator[Jobs]:
        """Follow the store within the context; the first read may still be in progress.

        If the watch fails, the context ends with its error, in an exception group.
        """
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self.watching.run(), name="watch all jobs")
            try:
                yield self
            finally:
                watching.cancel()

    @property
    def revision(self) -> int:
        """The store's revision up to which the states are current; 0 before the first read."""
        return self.mirror.revision

    @property
    def sequence(self) -> int:
        """A counter of changes; 0 before the first read."""
        return self.mirror.loaded + self._changes

    async def changed_after(self, sequence: int) -> None:
        """Wait until ``self.sequence`` is above ``sequence``; 0 waits for the first read."""
        await self.mirror.changed_after(0)
        while self.sequence <= sequence:
            await self._changed.wait()

    def states(self) -> Mapping[JobKeys, JobState]:
        """Return the readable states of all jobs that have a job record."""
        states = ((keys, job.state()) for keys, job in self._jobs.items())
        return {
            keys: one for keys, one in states if one is not None and one.snapshot.job is not None
        }

    def state(self, keys: JobKeys) -> JobState | None:
        """Return the state of one job; None if the store has none, or if it cannot be read."""
        job = self._jobs.get(keys)
        return None if job is None else job.state()

    def has(self, keys: JobKeys) -> bool:
        """Return whether the store has any record of a job, readable or not."""
        return keys in self._jobs

    def _apply(self, events: Sequence[WatchEvent]) -> None:
        of_jobs: dict[JobKeys, list[WatchEvent]] = {}
        for event in events:
            found = job_of(event.kv.key)
            if found is None:
                continue
            of_jobs.setdefault(found[0], []).append(event)
        for keys, news in of_jobs.items():
            job = self._jobs.get(keys) or self._jobs.setdefault(keys, _Job(keys, self._clock))
            job.apply(news)
            if not job.mirror.kvs:
                del self._jobs[keys]
        if of_jobs:
            self._changes += 1
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
