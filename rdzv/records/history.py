# SPDX-License-Identifier: Apache-2.0
"""The history of a job: joins, leaves, losses and rounds, for people to read; bounded.

Numbers of rounds are unique over all lives of a job in the store; people read them from 0.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import field
from typing import Literal, Self

from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.keys import JobKeys
from rdzv.records.codec import UnixTime, decode_record, encode
from rdzv.store import Delete, KeyValue, Operation, Put

log = logging.getLogger(__name__)

HISTORY_LENGTH = 200
"""Entries kept for each job: some 40 KB."""

Happening = Literal[
    "join",
    "leave",
    "lost",
    "failed",
    "wait",
    "round",
    "world",
    "closed",
    "generation",
    "drain",
    "slow",
    "forget",
    "quarantine",
    "admit",
    "set",
    "pause",
    "resume",
    "state",
]


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One event in the history.

    ``at_unix_s`` is the writer's wall clock, for people only: nothing is decided by it.
    ``revision`` is the store's when the entry was written; 0 for one not written yet.
    """

    what: Happening
    member: str
    why: str
    at_unix_s: UnixTime
    details: dict[str, object] = field(default_factory=dict)
    revision: int = 0

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return encode(self, without=("revision",), at_unix_s=round(self.at_unix_s, 3))

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        return decode_record(cls, kv, revision=kv.mod_revision)


def departures(entries: Iterable[KeyValue]) -> dict[str, int]:
    """Return the members that left on purpose, with the revision at which each did so last."""
    left: dict[str, int] = {}
    for kv in entries:
        if not JobKeys.records_departure(kv.key):
            continue  # not decoded: each sidecar reads the whole history at each departure
        try:
            entry = HistoryEntry.from_kv(kv)
        except RecordError:
            continue
        if entry.what == "leave":
            left[entry.member] = max(kv.mod_revision, left.get(entry.member, 0))
    return left


def losses(entries: Iterable[KeyValue]) -> set[str]:
    """Return the members whose loss is among ``entries``."""
    found = set()
    for kv in entries:
        if kv.key.endswith(".lost"):
            with suppress(RecordError):
                found.add(HistoryEntry.from_kv(kv).member)
    return found


def entry_operations(
    keys: JobKeys, entry: HistoryEntry, at_revision: int, present: Iterable[str]
) -> tuple[Operation, ...]:
    """Return the operations that write ``entry`` and delete what is beyond the bound.

    ``at_revision`` is that of the snapshot in which it happened: two members that report the same
    thing write the same key. ``present`` are the history keys known to be there.
    """
    oldest_first = sorted(present)
    surplus = oldest_first[: max(0, len(oldest_first) + 1 - HISTORY_LENGTH)]
    put = Put(keys.history_entry(at_revision, entry.member, entry.what), entry.to_json())
    return (put, *(Delete(key) for key in surplus[:20]))


ROUNDS_PER_LIFE = 1_000_000
"""Distance between the first round numbers of two generations: more rounds than one ever has."""


def shown_round(number: int) -> int:
    """Return the number of a round in its generation: the first one is 0."""
    return number % ROUNDS_PER_LIFE
