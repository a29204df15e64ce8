# SPDX-License-Identifier: Apache-2.0
"""Members that are gone: their losses, their leftovers, and the roll-out that ends with them.

A member that vanished without leaving is noticed by the others, and put into the history. The pods
of a Deployment never come back under their names, so that the records that they leave would grow
for as long as the job exists. And a roll-out is taken back by a present member: the last pod of the
former template may have started before the last one of the newer was gone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from time import time

from rdzv.job import JobClient
from rdzv.keys import JobKeys, last_name
from rdzv.members.registrar import Registrar
from rdzv.members.templates import left_to
from rdzv.reconcile import DueWrite, Kernel, Loop, Outlook, Reconciler
from rdzv.records.job import (
    HISTORY_LENGTH,
    HistoryEntry,
    Job,
    Member,
    change_between,
    departures,
    losses,
)
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, GuardedWrites, KeyValue, Operation, Put, WatchEvent

log = logging.getLogger(__name__)

KEPT_MIN = 200

RETRY_S = 1.0
"""Interval of looks at a job of another generation than that of the registration, in seconds."""


def lost_members(before: Snapshot, after: Snapshot, departed: frozenset[str]) -> tuple[Member, ...]:
    """Return the members of ``before`` that are not in ``after`` and did not leave (``departed``).

    A new generation begins without members; that is no loss.
    """
    if before.job is None or after.job is None or before.job.generation != after.job.generation:
        return ()
    return tuple(
        member
        for name, member in sorted(before.members.items())
        if name not in after.members and name not in departed
    )


class Losses(Loop):
    """The writer of a ``lost`` entry for each loss; only the oldest listed member writes."""

    def __init__(self, client: JobClient, me: str) -> None:
        super().__init__(client.mirror.clock)
        self._client = client
        self._me = me
        self._history = client.keys.history
        self._before: Snapshot | None = None
        self._entries: list[KeyValue] = []
        self._goodbyes: set[str] = set()

    async def run(self) -> None:
        """Follow the membership until cancelled."""
        unsubscribe = self._client.mirror.subscribe(self._note_entries)
        try:
            await super().run()
        finally:
            unsubscribe()

    async def step(self) -> Outlook:
        """Write who has vanished since the last look."""
        after = self._client.membership.snapshot()
        before, self._before = self._before or after, after
        # If members have only come, the history entries need not be parsed.
        if not before.members.keys() <= after.members.keys():
            self._read_entries()
        lost = lost_members(before, after, frozenset(self._goodbyes))
        self._entries.clear()
        self._goodbyes.clear()
        if lost and self._is_reporter():
            for member in lost:
                await self._report(member, after.revision)
        return Outlook(partial(self._client.membership.changed_from, after))

    def _is_reporter(self) -> bool:
        # By age, and not by who trains: a sidecar can report without a launcher beside it.
        listed = self._client.membership.listing().listed
        return bool(listed) and listed[0].name == self._me

    async def _report(self, member: Member, revision: int) -> None:
        entry = HistoryEntry(
            what="lost",
            member=member.name,
            why="its lease expired",
            at_unix_s=time(),
            details={"incarnation": member.incarnation, "pod_uid": member.pod_uid},
        )
        await self._client.note(entry, revision)

    def _note_entries(self, events: Sequence[WatchEvent]) -> None:
        for event in events:
            if event.kind == "put" and event.kv.key.startswith(self._history):
                self._entries.append(event.kv)
        if len(self._entries) > HISTORY_LENGTH:
            self._read_entries()

    def _read_entries(self) -> None:
        # An eviction has its entry already.
        self._goodbyes |= departures(self._entries).keys() | losses(self._entries)
        self._entries.clear()


def kept(snapshot: Snapshot) -> int:
    """Return how many records of a kind to keep: twice those of a cut that hits all pods."""
    return max(KEPT_MIN, 2 * snapshot.job.policy.max_nodes) if snapshot.job else KEPT_MIN


def leftovers(keys: JobKeys, snapshot: Snapshot, kvs: Iterable[KeyValue]) -> list[KeyValue]:
    """Return the records of members and generations of the job that are gone for good.

    The pods of a Deployment never come back under their names, so that what they leave would
    grow for as long as the job exists. The newest records stay: a pod behind a cut may still
    return, and finds its place and its drain.
    """
    if snapshot.job is None:
        return []
    here = keys.in_generation(snapshot.job.generation)
    present = {member.pod_uid for member in snapshot.members.values()}
    former: list[KeyValue] = []
    incarnations: list[KeyValue] = []
    drains: list[KeyValue] = []
    quarantines: list[KeyValue] = []
    for kv in kvs:
        if kv.key.startswith(keys.incarnations):
            if last_name(kv.key) not in snapshot.members:
                incarnations.append(kv)
        elif kv.key.startswith(here.drains):
            if last_name(kv.key) not in present:
                drains.append(kv)
        elif kv.key.startswith(here.quarantines):
            if last_name(kv.key) not in snapshot.members:
                quarantines.append(kv)
        elif kv.key.startswith(keys.generations) and _is_former(keys, snapshot, kv.key):
            # Written by a sidecar that did not know yet that this generation was over.
            former.append(kv)
    most = kept(snapshot)
    return [*former, *oldest(incarnations, most), *oldest(drains, most), *oldest(quarantines, most)]


def oldest(kvs: Sequence[KeyValue], most: int) -> list[KeyValue]:
    """Return those beyond the ``most`` that were written last, the oldest first."""
    by_age = sorted(kvs, key=lambda kv: kv.mod_revision)
    return by_age[: max(0, len(by_age) - most)]


def _is_former(keys: JobKeys, snapshot: Snapshot, key: str) -> bool:
    assert snapshot.job is not None
    number = key[len(keys.generations) :].partition("/")[0]
    return number.isdecimal() and int(number) < snapshot.job.generation


class RollBack(Reconciler):
    """The return to this member's template once no member with the present one is left.

    ``patience_s``: how long none must have been there, as one that has lost its lease may come
    back. A shorter one takes a roll-out back for an outage of the store.

    A Deployment starts the last pod of the former template before the last one of the newer is
    gone: then no registration shows that no member has the newer one, and a present member has
    to notice.
    """

    def __init__(self, kernel: Kernel, registrar: Registrar, *, patience_s: float) -> None:
        super().__init__(kernel, "roll-back")
        self._registrar = registrar
        self._patience_s = patience_s
        self._since_s: float | None = None

    async def step(self) -> Outlook:
        """Decide whether this member is left alone with another template, and for how long."""
        membership, now = self.kernel.client.membership, self.kernel.clock()
        snapshot = membership.snapshot()
        before, job = snapshot.job, self._left(snapshot)
        changed = partial(membership.changed_from, snapshot)
        if before is None or job is None:
            self._since_s = None
            return Outlook(changed)
        self._since_s = now if self._since_s is None else self._since_s
        due_s = self._since_s + self._patience_s
        if now < due_s:
            return Outlook(changed, due_s)
        if self._registrar.generation not in (None, job.generation):
            return Outlook(changed, now + RETRY_S)
        change = change_between(before, job)
        writes = partial(self._writes, snapshot, job, change)
        return Outlook(changed, write=DueWrite(writes, written=partial(self._log, change)))

    def _left(self, snapshot: Snapshot) -> Job | None:
        identity = self._registrar.identity
        return left_to(snapshot, identity.member, identity.policy)

    def _writes(self, snapshot: Snapshot, job: Job, change: str) -> GuardedWrites:
        # After an attempt that fails members may be about to come back: wait for them once more.
        self._since_s = self.kernel.clock()
        client = self.kernel.client
        operations: list[Operation] = [Put(client.keys.job, job.to_json())]
        if change:
            why = f"no member with the newer template is left: {change}"
            entry = HistoryEntry("set", self._registrar.identity.member, why, time())
            operations += client.history(entry)
        # No member has come, or come back, since.
        members = client.keys.in_generation(job.generation).members
        return [
            Compare(client.keys.job, "mod", "=", job.mod_revision),
            Compare(members, "mod", "<", snapshot.revision + 1, prefix=True),
        ], operations

    def _log(self, change: str) -> None:
        log.info(
            "no member with the newer template is left: rolled back to this pod's template%s",
            f": {change}" if change else "",
            extra={"event": "template"},
        )
