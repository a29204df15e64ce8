# SPDX-License-Identifier: Apache-2.0
"""The membership as a mirror shows it: a snapshot that is parsed once per changed record."""

from __future__ import annotations

from collections.abc import Sequence

from rdzv.errors import RecordError
from rdzv.keys import JobKeys
from rdzv.model import Drain, Incarnation, Job, Member, Snapshot
from rdzv.store import RangeResult, WatchEvent
from rdzv.watching import Mirror

Record = Job | Member | Incarnation | Drain


class Membership:
    """Gives the newest snapshot of one job; the same object for as long as nothing in it moved."""

    def __init__(self, keys: JobKeys, mirror: Mirror) -> None:
        self.keys = keys
        self._mirror = mirror
        self._records: dict[str, Record] = {}
        self._corrupt: dict[str, str] = {}
        self._snapshot: Snapshot | None = None
        self._generations = keys.generations
        mirror.subscribe(self._apply)
        self._apply([WatchEvent("put", kv) for kv in mirror.kvs.values()])

    def snapshot(self) -> Snapshot:
        """The membership now. Its revision is that of the last change to a record in it."""
        if self._snapshot is None:
            self._snapshot = self._build()
        return self._snapshot

    def _apply(self, events: Sequence[WatchEvent]) -> None:
        for event in events:
            kind = self._kind(event.kv.key)
            if kind is None:
                continue
            key = event.kv.key
            self._snapshot = None
            self._records.pop(key, None)
            self._corrupt.pop(key, None)
            if event.kind == "put":
                try:
                    self._records[key] = kind.from_kv(event.kv)
                except RecordError as error:
                    self._corrupt[key] = str(error)

    def _kind(self, key: str) -> type[Record] | None:
        if key == self.keys.job:
            return Job
        if key.startswith(self.keys.incarnations):
            return Incarnation
        if not key.startswith(self._generations):
            return None
        parts = key[len(self._generations) :].split("/")
        if len(parts) != 3:
            return None
        return {"members": Member, "drains": Drain}.get(parts[1])

    def _build(self) -> Snapshot:
        job = self._records.get(self.keys.job)
        assert job is None or isinstance(job, Job)
        current = self.keys.in_generation(job.generation if job else 1)
        members, incarnations, drains = {}, {}, {}
        for key, record in self._records.items():
            if isinstance(record, Member) and key.startswith(current.members):
                members[record.name] = record
            elif isinstance(record, Incarnation):
                incarnations[record.member] = record
            elif isinstance(record, Drain) and key.startswith(current.drains):
                drains[record.pod_uid] = record
        return Snapshot(
            self._mirror.revision, job, members, incarnations, drains, dict(self._corrupt)
        )


def snapshot_of(keys: JobKeys, read: RangeResult) -> Snapshot:
    """The membership as one read of the job's prefix shows it."""
    mirror = Mirror(keys.prefix, clock=lambda: 0.0)
    mirror.replace(read.kvs, read.revision)
    return Membership(keys, mirror).snapshot()
