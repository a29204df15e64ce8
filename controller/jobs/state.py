# SPDX-License-Identifier: Apache-2.0
"""One job at one revision: its membership and its history."""

from __future__ import annotations

from dataclasses import dataclass, field

from rdzv.errors import RecordError
from rdzv.keys import JobKeys
from rdzv.listing import Listing
from rdzv.records.history import HistoryEntry
from rdzv.snapshot import Snapshot
from rdzv.store import KeyValue


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
