# SPDX-License-Identifier: Apache-2.0
"""What happened to a job: nothing of it takes another's place."""

from __future__ import annotations

from rdzv.keys import JobKeys
from rdzv.records.history import Happening, HistoryEntry, departures, entry_operations
from rdzv.store import KeyValue, Operation
from rdzv.store.interface import Interval
from rdzv.store.memory.client import MemoryEngine, transact

KEYS = JobKeys("team", "digits")


def happened(what: Happening, why: str = "") -> tuple[Operation, ...]:
    """Write that it happened to one member, as somebody who sees revision 7 does."""
    return entry_operations(KEYS, HistoryEntry(what, "w-0", why, 1.0), 7, ())


def found(*written: tuple[Operation, ...]) -> list[KeyValue]:
    """What is in the store once all of it was written, in the order of its keys."""
    engine = MemoryEngine()
    for operations in written:
        assert transact(engine, [], operations).succeeded
    return list(engine.read(Interval.of(KEYS.history, prefix=True)))


def kept(*written: tuple[Operation, ...]) -> list[str]:
    """What it says has happened, in that order."""
    return [HistoryEntry.from_kv(kv).what for kv in found(*written)]


def test_two_things_that_happen_to_a_member_at_one_revision_are_both_kept() -> None:
    what = kept(happened("join"), happened("drain"), happened("leave"))
    assert sorted(what) == ["drain", "join", "leave"]


def test_what_two_members_report_is_one_entry() -> None:
    assert kept(happened("lost", "seen by w-1"), happened("lost", "seen by w-2")) == ["lost"]


def test_entries_sort_by_revision_whatever_happened() -> None:
    later = KEYS.history_entry(10, "a", "drain")
    assert KEYS.history_entry(9, "w-9", "round") < later < KEYS.history_entry(10, "b", "closed")


def test_departures_are_the_last_leave_of_each_member_and_nothing_else() -> None:
    def written(what: Happening, member: str, revision: int) -> tuple[Operation, ...]:
        return entry_operations(KEYS, HistoryEntry(what, member, "", 1.0), revision, ())

    entries = found(
        written("join", "a", 3),
        written("leave", "a", 5),
        written("leave", "leave", 6),
        written("join", "b.leave", 7),
        written("lost", "c", 8),
        written("leave", "a", 9),
    )
    last = {kv.key: kv.mod_revision for kv in entries}
    assert departures(entries) == {
        "a": last[KEYS.history_entry(9, "a", "leave")],
        "leave": last[KEYS.history_entry(6, "leave", "leave")],
    }
