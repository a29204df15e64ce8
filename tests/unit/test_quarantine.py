# SPDX-License-Identifier: Apache-2.0
"""Members whose torchrun dies again and again: counted, kept out, let in again, forgotten."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from rdzv.records.quarantine import (
    Death,
    Quarantine,
    Terms,
    after_death,
    after_time,
)
from rdzv.snapshot import Snapshot
from rdzv.store import KeyValue, RangeResult
from tests.support.records import kv, member, node, run, world

KEYS = JobKeys("team", "digits")
HERE = KEYS.in_generation(1)
TERMS = Terms(deaths=3, first_s=60, longest_s=300, forget_s=600, steps=200, worlds=6, brief_s=60)
OUT = Quarantine("c", "uid-c", 3, "third", out=True, mod_revision=7)
NOW = 1000.0


GONE_FOR_GOOD = replace(OUT, deaths=9, fruitless=6)


def dead(
    known: Quarantine | None,
    died: str,
    pod_uid: str = "uid-c",
    steps: int | None = None,
    world_s: float | None = None,
) -> Quarantine | None:
    return after_death(known, "c", pod_uid, Death(died, steps, world_s), TERMS).record


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
    assert after_death(OUT, "c", "uid-c", Death("third"), TERMS).drop is False


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


# --- progress ---


@pytest.mark.parametrize("known", [None, replace(OUT, out=False, fruitless=5), OUT])
def test_a_death_after_progress_does_not_count_nor_do_those_before_it(
    known: Quarantine | None,
) -> None:
    decision = after_death(known, "c", "uid-c", Death("next", 200, 30.0), TERMS)
    assert decision.record is None
    assert decision.drop == (known is not None)


@pytest.mark.parametrize(
    ("steps", "world_s", "row"),
    [
        (0, 3600.0, 4),
        (199, 3600.0, 4),
        (None, 59.0, 4),
        (None, 60.0, 0),
        (None, math.inf, 0),
        (None, None, 3),
        (0, None, 3),
    ],
    ids=[
        "none made",
        "one too few",
        "untold, at once",
        "untold, later",
        "untold, of a former sidecar",
        "in no world",
        "none made, in no world",
    ],
)
def test_only_worlds_that_were_ended_without_progress_are_counted_in_a_row(
    steps: int | None, world_s: float | None, row: int
) -> None:
    known = replace(OUT, out=False, deaths=1, fruitless=3)
    after = dead(known, "next", steps=steps, world_s=world_s)
    assert after is not None
    assert (after.deaths, after.fruitless) == (2, row)


def test_where_steps_are_not_looked_at_a_world_without_progress_is_a_short_one() -> None:
    unseeing = replace(TERMS, steps=0)
    assert not Death("x", 10**6, 1.0).has_progress(unseeing)
    assert Death("x", 0, 3600.0).adds_to(3, unseeing) == 0
    assert Death("x", 10**6, 1.0).adds_to(3, unseeing) == 4


def test_the_sixth_world_in_a_row_keeps_it_out_until_it_is_let_in() -> None:
    known: Quarantine | None = None
    for n in range(6):
        assert known is None or not known.stays(TERMS)
        known = dead(known, f"{n}", steps=3, world_s=20.0)
    assert known is not None
    assert known.stays(TERMS)
    assert "6 worlds in a row without progress" in known.sentence
    assert "stays out until muster admit c" in known.sentence
    waits = after_time(NOW, known, NOW - 1e6, NOW - 1e6, TERMS)
    assert (waits.record, waits.drop, waits.wake_at_s) == (None, False, math.inf)


@pytest.mark.parametrize("death", [Death("x", 5000, 9e3), Death("x", None, 9e3), Death("x")])
def test_who_is_kept_out_for_good_stays_so_also_where_min_has_let_it_train(death: Death) -> None:
    decision = after_death(GONE_FOR_GOOD, "c", "uid-c", death, TERMS)
    assert not decision.drop
    assert decision.record is None or decision.record.stays(TERMS)


@pytest.mark.parametrize("steps", [None, 0, 199, 200])
def test_a_row_goes_on_beside_a_torchrun_that_gets_nowhere(steps: int | None) -> None:
    known = replace(OUT, out=False, fruitless=2)
    decision = after_time(NOW, known, NOW - 600, NOW - 590, TERMS, steps)
    assert decision.drop == (steps not in (0, 199))
    assert decision.drop or decision.wake_at_s > NOW


DEATHS = st.builds(
    Death,
    st.uuids().map(str),
    st.none() | st.integers(0, 400),
    st.none() | st.sampled_from([1.0, 59.0, 61.0, math.inf]),
)


@given(st.lists(DEATHS, max_size=30))
def test_it_is_kept_out_for_good_after_so_many_in_a_row_and_not_before(deaths: list[Death]) -> None:
    known, row, for_good = None, 0, False
    for death in deaths:
        decision = after_death(known, "c", "uid-c", death, TERMS)
        known = None if decision.drop else decision.record or known
        if death.world_s is not None:
            fruitless = death.steps < 200 if death.steps is not None else death.world_s < 60
            row = row + 1 if fruitless else 0
        elif death.steps is not None and death.steps >= 200:
            row = 0
        for_good = for_good or row >= TERMS.worlds
        assert (known is not None and known.stays(TERMS)) == for_good


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
