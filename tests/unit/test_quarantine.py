# SPDX-License-Identifier: Apache-2.0
"""Members whose torchrun dies again and again: counted, kept out, let in again, forgotten."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from launcher_shim.c10d.rounds.decision import decide
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.observations import RoundObservations
from launcher_shim.c10d.rounds.records import Round
from launcher_shim.c10d.rounds.run_membership import run_membership
from rdzv import listing
from rdzv.drain.decision import is_enough
from rdzv.keys import JobKeys
from rdzv.members.leftovers import leftovers
from rdzv.membership import snapshot_of
from rdzv.records.job import Job
from rdzv.records.quarantine import Quarantine, Terms, after_death, after_time
from rdzv.snapshot import Snapshot
from rdzv.store import KeyValue, RangeResult
from tests.support.records import kv, member, node, run, world

KEYS = JobKeys("team", "digits")
HERE = KEYS.in_generation(1)
TERMS = Terms(deaths=3, first_s=60, longest_s=300, forget_s=600)
OUT = Quarantine("c", "uid-c", 3, "third", out=True, mod_revision=7)
NOW = 1000.0


def dead(known: Quarantine | None, died: str, pod_uid: str = "uid-c") -> Quarantine | None:
    return after_death(known, "c", pod_uid, died, TERMS).record


# --- the record ---


def test_the_third_death_quarantines() -> None:
    first = dead(None, "one")
    second = dead(first, "two")
    third = dead(second, "three")
    assert first is not None
    assert second is not None
    assert third is not None
    assert [(one.deaths, one.out) for one in (first, second, third)] == [
        (1, False),
        (2, False),
        (3, True),
    ]


def test_a_death_counts_once() -> None:
    assert dead(OUT, "third") is None
    assert after_death(OUT, "c", "uid-c", "third", TERMS).drop is False


def test_a_new_pod_of_the_name_begins_anew_over_the_record_of_the_former() -> None:
    assert dead(OUT, "fourth", "uid-new") == Quarantine("c", "uid-new", 1, "fourth", mod_revision=7)


@pytest.mark.parametrize(
    ("deaths", "hold_s"), [(3, 60), (4, 120), (5, 240), (6, 300), (60, 300), (10**9, 300)]
)
def test_each_further_death_doubles_how_long_one_has_to_live(deaths: int, hold_s: float) -> None:
    assert TERMS.hold_s(deaths) == hold_s


def test_it_is_let_in_once_a_torchrun_has_lived_for_the_time() -> None:
    waits = after_time(NOW, OUT, NOW - 100, NOW - 59, TERMS)
    assert (waits.record, waits.drop, waits.wake_at_s) == (None, False, NOW + 1)
    assert after_time(NOW, OUT, NOW - 59, NOW - 100, TERMS).wake_at_s == NOW + 1
    assert after_time(NOW, OUT, NOW - 100, NOW - 60, TERMS).record == replace(OUT, out=False)


def test_time_alone_lets_nobody_in_where_no_torchrun_lives() -> None:
    waits = after_time(NOW, OUT, NOW - 1e6, None, TERMS)
    assert (waits.record, waits.drop, waits.wake_at_s) == (None, False, math.inf)


def test_who_dies_again_after_it_was_let_in_is_kept_out_for_twice_as_long() -> None:
    again = dead(replace(OUT, out=False), "fourth")
    assert again is not None
    assert (again.deaths, again.out) == (4, True)


@pytest.mark.parametrize("alive_s", [None, NOW - 700])
def test_deaths_are_forgotten_when_nothing_has_died_for_long(alive_s: float | None) -> None:
    known = replace(OUT, out=False)
    assert after_time(NOW, known, NOW - 599, alive_s, TERMS).wake_at_s == NOW + 1
    assert after_time(NOW, known, NOW - 600, alive_s, TERMS).drop


def stored(record: Quarantine, revision: int = 7) -> KeyValue:
    return kv(HERE.quarantine(record.member), revision, record.to_json())


# --- who is kept out ---


def job(members: str = "abc", *records: Quarantine, least: int = 2) -> Snapshot:
    pods = {name: member(name, ord(name), min_workers=least) for name in members}
    return Snapshot(9, Job(least, 4), pods, quarantines={one.member: one for one in records})


def test_the_store_says_who_is_quarantined() -> None:
    kvs = (
        kv(KEYS.job, 1, Job(2, 4).to_json()),
        KeyValue(HERE.member("c"), member("c", min_workers=2).to_json(), 1, 2, 1, 5),
        stored(OUT),
    )
    snapshot = snapshot_of(KEYS, RangeResult(9, kvs))
    assert snapshot.quarantine_of(snapshot.members["c"]) == OUT


def test_a_quarantined_member_is_not_listed_and_is_told_what_ends_that() -> None:
    listed = listing.decide(job("abc", OUT))
    assert [one.name for one in listed.listed] == ["a", "b"]
    assert "has died 3 times" in listed.excluded["c"]
    assert "muster admit c" in listed.excluded["c"]
    assert listed.quarantined == frozenset("c")


@pytest.mark.parametrize("record", [replace(OUT, out=False), replace(OUT, pod_uid="uid-former")])
def test_who_was_let_in_and_a_new_pod_of_the_name_are_listed(record: Quarantine) -> None:
    assert len(listing.decide(job("abc", record)).listed) == 3


def test_a_quarantined_member_that_min_needs_is_listed_but_lets_nobody_go() -> None:
    few = job("bc", OUT)
    listed = listing.decide(few)
    assert [one.name for one in listed.listed] == ["b", "c"]
    assert not is_enough(few, listed)
    assert is_enough(job("abc", OUT), listing.decide(job("abc", OUT)))


def test_rounds_know_who_is_quarantined() -> None:
    snapshot = job("abc", OUT)
    one = run_membership(snapshot, listing.decide(snapshot), "digits", Round(3))
    assert (one.listed, one.quarantined) == (frozenset("abc"), frozenset("c"))


def asking(members: str, current: Round | None = None, quarantined: str = "c") -> RunSnapshot:
    membership = RoundMembers(frozenset("abcd"), quarantined=frozenset(quarantined))
    return run(map(node, members), current, membership=membership)


@pytest.mark.parametrize(
    ("members", "quarantined", "frozen"),
    [("abcd", "c", "abd"), ("ac", "c", "ac"), ("abcd", "bcd", "abcd"), ("abcd", "abcd", "abcd")],
    ids=["others are enough", "too few others", "most are", "all are"],
)
def test_a_quarantined_one_is_frozen_only_where_the_others_are_too_few(
    members: str, quarantined: str, frozen: str
) -> None:
    seen = RoundObservations(healthy_since_s=NOW, met_min_s=NOW - 100)
    decision = decide(NOW, asking(members, quarantined=quarantined), seen, RoundPolicy(2, 4))
    assert decision.round is not None
    assert "".join(seat.member for seat in decision.round.frozen) == frozen


def test_a_quarantined_one_that_asks_makes_no_waiter() -> None:
    two = world("ab")
    assert asking("abc", two, quarantined="").newcomers()
    assert not asking("abc", two).newcomers()
    assert asking("abcd", two).newcomers()


def test_what_gone_pods_left_is_bounded() -> None:
    gone = [stored(replace(OUT, member=f"gone-{n}"), revision=n) for n in range(1, 251)]
    kvs = [*gone, stored(OUT)]
    surplus = leftovers(KEYS, job("abc", OUT), kvs)
    assert surplus == gone[:50]
