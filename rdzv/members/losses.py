# SPDX-License-Identifier: Apache-2.0
"""Members that vanished without leaving: noticed by the others, and put into the history."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import time

from rdzv.job import JobClient
from rdzv.reconcile import Loop, Outlook
from rdzv.records.history import HISTORY_LENGTH, HistoryEntry, departures, losses
from rdzv.records.job import Member
from rdzv.snapshot import Snapshot
from rdzv.store import KeyValue, WatchEvent


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
