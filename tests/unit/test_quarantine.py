# SPDX-License-Identifier: Apache-2.0
"""Members that fail first, world after world: counted, left out, let in again, forgotten."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.c10d.rounds.decision import decide
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy, RunSnapshot, run_membership
from launcher_shim.c10d.rounds.observations import RoundObservations
from launcher_shim.c10d.rounds.records import Round
from launcher_shim.c10d.rounds.world import reform
from rdzv.keys import JobKeys
from rdzv.members.gone import leftovers
from rdzv.membership import snapshot_of
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.records.quarantine import (
    FormedWorld,
    Quarantine,
    QuarantineDecision,
    Stay,
    Terms,
    after_death,
    after_progress,
    after_time,
)
from rdzv.snapshot import Snapshot, is_enough, listing_of
from rdzv.store import KeyValue, RangeResult
from tests.support.records import kv, member, node, run, world

KEYS = JobKeys("team", "digits")
HERE = KEYS.in_generation(1)
TERMS = Terms(worlds=3, steps=200, brief_s=60, first_s=60, longest_s=300, trial_s=600)
OUT = Quarantine("c", "uid-c", 3, "third", out=True, mod_revision=7, pauses=1)
NOW = 1000.0


class Store:
    """The records as the store has them, which counts revisions."""

    def __init__(self, members: str, least: int = 1) -> None:
        self.members = members
        self.least = least
        self.revision = 0
        self.records: dict[str, Quarantine] = {}

    @property
    def out(self) -> str:
        return "".join(sorted(name for name, one in self.records.items() if one.out))

    @property
    def next_world(self) -> str:
        """Whom the next world is of, if all ask."""
        fit = "".join(name for name in self.members if name not in self.out)
        return fit if len(fit) >= self.least else self.members

    def write(self, decision: QuarantineDecision) -> None:
        self.revision += 1
        for name, one in decision.records.items():
            self.records.pop(name, None)
            if one is not None:
                self.records[name] = replace(one, mod_revision=self.revision)

    def fails(self, died: str, members: str | None = None, steps: int | None = 0) -> None:
        """Let a world form and fail; these die in it, in this order."""
        self.revision += 1
        formed = FormedWorld(frozenset(members or self.next_world), self.revision)
        for name in died:
            stay = Stay(f"{name}{self.revision}", formed, 5.0, steps)
            fit = sum(other not in self.out and other != name for other in self.members)
            self.write(after_death(self.records, name, f"uid-{name}", stay, fit, self.least, TERMS))

    def progresses(self, members: str | None = None) -> None:
        self.write(after_progress(self.records, members or self.next_world))


# --- the row of worlds without progress ---


def test_the_third_world_in_a_row_leaves_out_the_one_that_failed_first_in_it() -> None:
    store = Store("abcd")
    store.fails("b")
    store.fails("cb")
    assert store.out == ""
    store.fails("bac")
    assert store.out == "b"
    assert store.next_world == "acd"


@pytest.mark.parametrize("died", ["a", "abcd", "dcba"])
def test_of_those_who_die_in_one_world_only_the_first_counts(died: str) -> None:
    store = Store("abcd")
    store.fails(died)
    assert {name: one.deaths for name, one in store.records.items()} == {died[0]: 1}


def test_progress_ends_the_row_whoever_was_in_that_world() -> None:
    store = Store("abcd")
    store.fails("b")
    store.fails("b")
    store.progresses("acd")
    store.fails("b")
    assert store.out == ""


def test_of_two_bad_ones_each_is_left_out_and_the_others_train() -> None:
    store = Store("abcd", least=2)
    for _ in range(3):
        store.fails("b")
    store.fails("d")
    assert store.next_world == "ac"
    store.progresses()
    assert all(one.proven for one in store.records.values())
    assert store.out == "bd"


@pytest.mark.parametrize("least", [1, 2, 4])
def test_what_fails_whoever_is_left_out_is_common_and_all_is_cleared(least: int) -> None:
    store = Store("abcd", least)
    for _ in range(3 - 1 + 4 - least):
        store.fails(store.next_world)
    assert len(store.out) == 4 - least
    store.fails(store.next_world[0])
    assert store.records == {}
    assert store.next_world == "abcd"


@pytest.mark.parametrize("worlds", range(12))
def test_i11_when_a_common_failure_is_over_all_train_with_no_hand(worlds: int) -> None:
    store = Store("abcd")
    for _ in range(worlds):
        store.fails(store.next_world)
    for _ in range(4):
        store.progresses()
        for one in [one for one in store.records.values() if one.out]:
            store.write(after_time(NOW, one, NOW - 300, TERMS, another_is_tried=False))
    store.progresses()
    assert store.records == {}


def test_a_crash_loop_at_the_smallest_size_leaves_nobody_out() -> None:
    store = Store("ab", least=2)
    for _ in range(10):
        store.fails("b")
        assert store.out == ""


def test_who_fails_again_after_its_pause_is_left_out_at_once_and_for_twice_as_long() -> None:
    store = Store("abc", least=2)
    for _ in range(3):
        store.fails("c")
    for pauses in (1, 2, 3):
        assert store.records["c"].pauses == pauses
        store.progresses()
        due = after_time(NOW, store.records["c"], NOW, TERMS, another_is_tried=False)
        assert due.wake_at_s == NOW + 60 * 2 ** (pauses - 1)
        store.write(after_time(NOW + 1e6, store.records["c"], NOW, TERMS, another_is_tried=False))
        assert store.out == ""
        store.progresses("ab")  # as a world does that it has not come into yet
        store.fails("c")


def test_progress_with_it_clears_its_record() -> None:
    store = Store("abc")
    store.records["c"] = replace(OUT, out=False, pauses=3)
    store.progresses("abc")
    assert store.records == {}


def test_a_death_counts_once() -> None:
    stay = Stay("third", FormedWorld(frozenset("abc"), 9), 1.0)
    assert after_death({"c": OUT}, "c", "uid-c", stay, 2, 1, TERMS).records == {}


def test_a_new_pod_of_the_name_begins_anew_over_the_record_of_the_former() -> None:
    stay = Stay("first", FormedWorld(frozenset("abc"), 9), 1.0)
    known = {"c": replace(OUT, proven=True)}
    after = after_death(known, "c", "uid-new", stay, 2, 1, TERMS).records["c"]
    assert after == Quarantine("c", "uid-new", 1, "first", mod_revision=7)


@pytest.mark.parametrize(
    ("steps", "lasted_s", "progress"),
    [
        (0, 3600.0, False),
        (199, 3600.0, False),
        (200, 1.0, True),
        (None, 59.0, False),
        (None, 60.0, True),
        (None, math.inf, True),
    ],
)
def test_progress_is_so_many_steps_or_a_while_where_none_are_told(
    steps: int | None, lasted_s: float, *, progress: bool
) -> None:
    stay = Stay("next", FormedWorld(frozenset("abc"), 9), lasted_s, steps)
    assert stay.has_progress(TERMS) == progress
    decision = after_death({"a": replace(OUT, member="a")}, "c", "uid-c", stay, 2, 1, TERMS)
    assert decision.records.get("a", OUT) == (None if progress else OUT)


@pytest.mark.parametrize(
    ("progress", "start_s", "lasted_s", "made"),
    [
        ("loads", 0.0, 3600.0, False),
        ("steps", 0.0, 3600.0, False),
        ("mute", 600.0, 599.0, False),
        ("mute", 600.0, 600.0, True),
        ("", 300.0, 299.0, False),
        ("", 0.0, 60.0, True),
    ],
)
def test_ranks_that_load_make_no_progress(
    progress: str, start_s: float, lasted_s: float, *, made: bool
) -> None:
    here = FormedWorld(frozenset("abc"), 9, progress=progress, start_s=start_s)
    assert Stay("next", here, lasted_s).has_progress(TERMS) == made
    unseeing = replace(TERMS, steps=0)
    assert Stay("next", here, lasted_s).has_progress(unseeing) == (made or progress == "steps")


def test_where_steps_are_not_looked_at_a_world_without_progress_is_a_short_one() -> None:
    unseeing, here = replace(TERMS, steps=0), FormedWorld(frozenset("abc"), 9)
    assert not Stay("x", here, 1.0, 10**6).has_progress(unseeing)
    assert Stay("x", here, 60.0, 0).has_progress(unseeing)


# --- the pause ---


@pytest.mark.parametrize(
    ("pauses", "pause_s"), [(0, 60), (1, 60), (2, 120), (3, 240), (4, 300), (10**9, 300)]
)
def test_each_pause_is_twice_as_long_as_the_one_before(pauses: int, pause_s: float) -> None:
    assert TERMS.pause_s(pauses) == pause_s


def test_the_product_pauses_for_one_minute_to_thirty() -> None:
    assert [Terms().pause_s(pauses) for pauses in (1, 2, 6, 9)] == [60, 120, 1800, 1800]


def test_it_is_let_in_once_its_pause_is_over_and_a_world_without_it_has_made_progress() -> None:
    proven = replace(OUT, proven=True)
    waits = after_time(NOW, proven, NOW - 59, TERMS, another_is_tried=False)
    assert (waits.records, waits.wake_at_s) == ({}, NOW + 1)
    let_in = after_time(NOW, proven, NOW - 60, TERMS, another_is_tried=False)
    assert let_in.records == {"c": replace(OUT, out=False, deaths=1)}


def test_without_any_progress_it_is_let_in_all_the_same_in_the_end() -> None:
    waits = after_time(NOW, OUT, NOW - 599, TERMS, another_is_tried=False)
    assert (waits.records, waits.wake_at_s) == ({}, NOW + 1)
    assert after_time(NOW, OUT, NOW - 600, TERMS, another_is_tried=False).records["c"]


def test_one_is_tried_at_a_time_for_as_long_as_a_pause() -> None:
    proven = replace(OUT, proven=True)
    waits = after_time(NOW, proven, NOW - 60, TERMS, another_is_tried=True)
    assert (waits.records, waits.wake_at_s) == ({}, NOW + 60)
    assert after_time(NOW, proven, NOW - 120, TERMS, another_is_tried=True).records["c"]


STORIES = st.lists(st.tuples(st.booleans(), st.sampled_from("abcd"), st.booleans()), max_size=40)


@given(STORIES, st.integers(1, 4))
def test_i11_as_many_stay_as_make_a_world_and_those_who_never_fail_are_never_out(
    story: list[tuple[bool, str, bool]], least: int
) -> None:
    store = Store("abcde", least)
    for progress, first, all_die in story:
        here = store.next_world
        if progress:
            store.progresses()
            assert set(store.records).isdisjoint(here)
        elif first in here:
            store.fails(first + ("".join(n for n in here if n not in (first, "e")) * all_die))
        assert 5 - len(store.out) >= least
        assert "e" not in store.records


def stored(record: Quarantine, revision: int = 7) -> KeyValue:
    return kv(HERE.quarantine(record.member), revision, record.to_json())


# --- who is kept out ---


def job(members: str = "abc", *records: Quarantine, least: int = 2) -> Snapshot:
    pods = {name: member(name, ord(name), min_workers=least) for name in members}
    return Snapshot(
        9, Job(JobPolicy(least, 4)), pods, quarantines={one.member: one for one in records}
    )


def test_the_store_says_who_is_quarantined() -> None:
    kvs = (
        kv(KEYS.job, 1, Job(JobPolicy(2, 4)).to_json()),
        KeyValue(HERE.member("c"), member("c", min_workers=2).to_json(), 1, 2, 1, 5),
        stored(OUT),
    )
    snapshot = snapshot_of(KEYS, RangeResult(9, kvs))
    assert snapshot.quarantine_of(snapshot.members["c"]) == OUT


def test_a_quarantined_member_is_not_listed_and_is_told_what_ends_that() -> None:
    listed = listing_of(job("abc", OUT))
    assert [one.name for one in listed.listed] == ["a", "b"]
    assert "has died 3 times" in listed.excluded["c"]
    assert "muster admit c" in listed.excluded["c"]
    assert listed.quarantined == frozenset("c")


@pytest.mark.parametrize("record", [replace(OUT, out=False), replace(OUT, pod_uid="uid-former")])
def test_who_was_let_in_and_a_new_pod_of_the_name_are_listed(record: Quarantine) -> None:
    assert len(listing_of(job("abc", record)).listed) == 3


def test_a_quarantined_member_that_min_needs_is_listed_but_lets_nobody_go() -> None:
    few = job("bc", OUT)
    listed = listing_of(few)
    assert [one.name for one in listed.listed] == ["b", "c"]
    assert not is_enough(few, listed)
    assert is_enough(job("abc", OUT), listing_of(job("abc", OUT)))


def test_rounds_know_who_is_quarantined() -> None:
    snapshot = job("abc", OUT)
    one = run_membership(snapshot, listing_of(snapshot), "digits", Round(3))
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


@pytest.mark.parametrize(
    ("members", "marked", "cause"),
    [
        ("abe", "ab", ""),
        ("abef", "ab", ""),
        ("abefg", "ab", "join"),
        ("abe", "b", ""),
        ("abe", "", "join"),
    ],
)
def test_i11_no_world_that_trains_becomes_smaller_for_what_is_held_against_its_members(
    members: str, marked: str, cause: str
) -> None:
    membership = RoundMembers(frozenset(members), quarantined=frozenset(marked))
    nodes = [*(node(name, "in") for name in "ab"), *map(node, members[2:])]
    snapshot = run(nodes, world("ab"), membership=membership)
    seen = RoundObservations(healthy_since_s=NOW)
    assert reform(NOW, snapshot, seen, RoundPolicy(1, 8)).cause == cause


def test_what_gone_pods_left_is_bounded() -> None:
    gone = [stored(replace(OUT, member=f"gone-{n}"), revision=n) for n in range(1, 251)]
    kvs = [*gone, stored(OUT)]
    surplus = leftovers(KEYS, job("abc", OUT), kvs)
    assert surplus == gone[:50]
