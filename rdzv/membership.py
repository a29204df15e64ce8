# SPDX-License-Identifier: Apache-2.0
"""The membership as a mirror shows it: a snapshot that is parsed once per changed record."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TypeVar, cast
from urllib.parse import unquote

from rdzv.errors import RecordError
from rdzv.keys import JobKeys
from rdzv.mirror import Mirror
from rdzv.records.drain import Commit, Drain, LastCommit, Vote
from rdzv.records.job import Incarnation, Job, Member
from rdzv.records.progress import PodSaves
from rdzv.records.quarantine import Quarantine
from rdzv.records.troubles import Failure
from rdzv.snapshot import Listing, Snapshot, listing_of
from rdzv.store import RangeResult, WatchEvent

log = logging.getLogger(__name__)

Record = (
    Job
    | Member
    | Incarnation
    | Drain
    | Commit
    | LastCommit
    | Vote
    | Quarantine
    | PodSaves
    | Failure
)
R = TypeVar("R", Member, Incarnation, Drain, Vote, Quarantine, PodSaves, Failure)

_CHOOSE_VOTES = (Vote, Commit, Job)
"""Records that decide which votes count: a matter of the generation and the epoch, of no member."""

_NOT_IN_SNAPSHOTS = (Vote, PodSaves, Failure)
"""Records that no snapshot has: many come within moments, and matter to few."""

REST_PER_MEMBER_S = 0.0005
"""Minimum interval between two wake-ups of one reader, for each member. A wake-up costs O(members),
so N members that join at once would cost O(N²) without it."""

REST_PER_DELAY = 4.0
MOST_RESTS = 20
MAX_DELAY_S = 0.5
"""If a wake-up is late, the event loop is overloaded: lengthen the next interval to REST_PER_DELAY
times the delay, but to at most MOST_RESTS normal intervals. One delay counts up to MAX_DELAY_S,
because a process that was suspended looks the same."""


class Membership:
    """The snapshots of one job, made from its mirror; the same object until a record changes."""

    def __init__(self, keys: JobKeys, mirror: Mirror) -> None:
        self.keys = keys
        self._mirror = mirror
        self._sections: dict[str, dict[str, Record]] = {}
        self._corrupt: dict[str, str] = {}
        self._unreadable: dict[type[Record], dict[str, int]] = {}
        self._snapshot: Snapshot | None = None
        self._listing: Listing | None = None
        self._votes: Mapping[str, Vote] | None = None
        self._votes_changed = asyncio.Event()
        self._changed = asyncio.Event()
        self._delay_s = 0.0
        self._job_key = keys.job
        self._last_commit_key = keys.last_commit
        self._incarnations = keys.incarnations
        self._generations = keys.generations
        mirror.subscribe(self._apply)
        self._apply([WatchEvent("put", kv) for kv in mirror.kvs.values()])

    def snapshot(self) -> Snapshot:
        """Return the newest snapshot. Its revision is that of the last change to a record in it."""
        if self._snapshot is None:
            self._snapshot = self._build()
        return self._snapshot

    def listing(self) -> Listing:
        """Return the listing of ``snapshot``, without regard to rounds; computed once for each."""
        if self._listing is None:
            self._listing = listing_of(self.snapshot())
        return self._listing

    async def changed_from(self, before: Snapshot) -> None:
        """Wait until the snapshot is not ``before`` any more; launchers' keys do not count.

        A single change wakes at once; changes in quick succession are debounced.
        """
        loop = asyncio.get_running_loop()
        usual_s = REST_PER_MEMBER_S * len(before.members)
        late_s = min(REST_PER_DELAY * self._delay_s, MOST_RESTS * usual_s)
        rested_s = loop.time() + max(usual_s, late_s)
        while self._snapshot is before:
            await self._changed.wait()
        if (left_s := rested_s - loop.time()) > 0:
            await asyncio.sleep(left_s)
            self._delay_s = min(loop.time() - rested_s, MAX_DELAY_S)

    def votes(self) -> Mapping[str, Vote]:
        """Return the votes of the present epoch, by member; the same object until one changes."""
        if self._votes is None:
            snapshot = self.snapshot()
            generation = snapshot.job.generation if snapshot.job else 1
            epoch = snapshot.commit.epoch if snapshot.commit else 0
            self._votes = self._records(self.keys.in_generation(generation).votes_of(epoch), Vote)
        return self._votes

    async def votes_changed_from(self, before: Mapping[str, Vote]) -> None:
        """Wait until the votes are not ``before`` any more, as after a vote or in another epoch.

        Votes have a wake-up of their own, as hundreds come within moments. Other records do not
        wake it, as it is not debounced.
        """
        while self.votes() is before:
            await self._votes_changed.wait()

    def saves(self) -> Mapping[str, PodSaves]:
        """Return the saves that pods have reported, by member; their changes wake no reader."""
        job = self.snapshot().job
        return self._records(self.keys.in_generation(job.generation if job else 1).saves, PodSaves)

    def failures(self) -> Mapping[str, Failure]:
        """Return the newest failure of each member's workers; their changes wake no reader."""
        job = self.snapshot().job
        here = self.keys.in_generation(job.generation if job else 1)
        return self._records(here.failures, Failure)

    def _apply(self, events: Sequence[WatchEvent]) -> None:
        for event in events:
            key = event.kv.key
            kind = self._kind(key)
            if kind is None:
                continue
            # Stored by section, so that a snapshot of hundreds of members is a mere copy.
            section, _, encoded = key.rpartition("/")
            name = unquote(encoded)
            records = self._sections.setdefault(section + "/", {})
            if kind in _CHOOSE_VOTES:
                self._votes = None
            if kind not in _NOT_IN_SNAPSHOTS:
                self._snapshot = self._listing = None
            records.pop(name, None)
            self._corrupt.pop(key, None)
            self._unreadable.get(kind, {}).pop(name, None)
            if event.kind == "put":
                try:
                    records[name] = kind.from_kv(event.kv)
                except RecordError as error:
                    log.warning("ignoring an unreadable record: %s", error)
                    self._corrupt[key] = str(error)
                    self._unreadable.setdefault(kind, {})[name] = event.kv.mod_revision
            elif not records:
                del self._sections[section + "/"]
        if self._votes is None:
            changed, self._votes_changed = self._votes_changed, asyncio.Event()
            changed.set()
        if self._snapshot is None:
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def _kind(self, key: str) -> type[Record] | None:
        if key == self._job_key:
            return Job
        if key == self._last_commit_key:
            return LastCommit
        if key.startswith(self._incarnations):
            return Incarnation
        if not key.startswith(self._generations):
            return None
        parts = key[len(self._generations) :].split("/")
        match parts[1:]:
            case ["members", _]:
                return Member
            case ["drains", _]:
                return Drain
            case ["quarantines", _]:
                return Quarantine
            case ["saves", _]:
                return PodSaves
            case ["failures", _]:
                return Failure
            case ["commit"]:
                return Commit
            case ["commit", _, _]:
                return Vote
        return None

    def _build(self) -> Snapshot:
        top = self._sections.get(self.keys.prefix, {})
        job = cast(Job | None, top.get("job"))
        current = self.keys.in_generation(job.generation if job else 1)
        commit = self._sections.get(current.prefix, {}).get("commit")
        return Snapshot(
            revision=self._mirror.certain_revision,
            job=job,
            members=self._records(current.members, Member),
            incarnations=self._records(self._incarnations, Incarnation),
            drains=self._records(current.drains, Drain),
            corrupt=dict(self._corrupt),
            unreadable_job=self._unreadable.get(Job, {}).get("job", 0),
            unreadable_incarnations=dict(self._unreadable.get(Incarnation, {})),
            commit=cast(Commit | None, commit),
            last_commit=cast(LastCommit | None, top.get("last_commit")),
            unreadable_commit=self._unreadable.get(Commit, {}).get("commit", 0),
            quarantines=self._records(current.quarantines, Quarantine),
        )

    def _records(self, section: str, kind: type[R]) -> dict[str, R]:
        """Return a copy of one section, all of whose records are of one kind."""
        return cast(dict[str, R], dict(self._sections.get(section, {})))


def snapshot_of(keys: JobKeys, read: RangeResult) -> Snapshot:
    """Build the membership from one read of the job's prefix."""
    mirror = Mirror(keys.prefix, clock=lambda: 0.0)
    mirror.replace(read.kvs, read.revision)
    return Membership(keys, mirror).snapshot()
