# SPDX-License-Identifier: Apache-2.0
"""The store's keys, how many are asked for at once, and the membership that they show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal
from urllib.parse import quote, unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.keys import ROOT, JobKeys, job_of, last_name
from rdzv.membership import Membership, snapshot_of
from rdzv.mirror import (
    LEAST_KEYS,
    LONGEST_S,
    MOST_KEYS,
    QUICK,
    Mirror,
    Paging,
    spelled,
    spelled_of_any_job,
)
from rdzv.records.drain import Commit, Drain, LastCommit, Vote
from rdzv.records.job import Incarnation, Job, Member
from rdzv.records.policy import JobPolicy
from rdzv.snapshot import Places, Snapshot, first_to_go, listing_of
from rdzv.store import DEFAULT_TIMEOUT_S, RangeResult, WatchEvent
from tests.support import records
from tests.support.records import drain, kv, member

JOB = Job(JobPolicy(1, 3))


def listing_member(name: str, incarnation: int, **changes: Any) -> Member:
    return records.member(name, incarnation, most=3, **changes)


def snapshot(*members: Member, **changes: Any) -> Snapshot:
    return replace(Snapshot(7, JOB, {m.name: m for m in members}), **changes)


def names(members: tuple[Member, ...]) -> list[str]:
    return [m.name for m in members]


def test_the_oldest_come_first_and_what_is_beyond_max_stands_by() -> None:
    listing = listing_of(snapshot(*(listing_member(f"w-{n}", 10 - n) for n in range(5))))
    assert names(listing.listed) == ["w-4", "w-3", "w-2"]
    assert names(listing.standby) == ["w-1", "w-0"]
    assert "2 on standby" in listing.reason


def test_who_came_back_after_a_cut_keeps_its_place_before_a_spare() -> None:
    members = [
        listing_member("w-0", 90, since=1),
        listing_member("w-1", 91, since=2),
        listing_member("w-2", 92, since=3),
    ]
    listing = listing_of(snapshot(*members, listing_member("spare", 89, since=4)))
    assert names(listing.listed) == ["w-0", "w-1", "w-2"]
    assert names(listing.standby) == ["spare"]


def test_where_pods_are_numbered_the_highest_is_foreseen_to_go_also_one_that_stands_by() -> None:
    pods = [listing_member(f"w-{n}", 10 - n, index=n) for n in (0, 1, 2, 10)]
    first = first_to_go(listing_of(snapshot(*pods)))
    assert first is not None
    assert first.name == "w-10"
    drained = {"uid-w-10": Drain("uid-w-10", "w-10", "node pressure", "preStop")}
    first = first_to_go(listing_of(snapshot(*pods, drains=drained)))
    assert first is not None
    assert first.name == "w-2"


def test_nobody_is_foreseen_to_go_where_pods_have_no_numbers_or_there_is_one() -> None:
    assert (
        first_to_go(listing_of(snapshot(listing_member("a", 1), listing_member("b", 2, index=1))))
        is None
    )
    assert first_to_go(listing_of(snapshot(listing_member("a", 1, index=0)))) is None


def test_each_excluded_member_has_its_reason() -> None:
    listing = listing_of(
        snapshot(
            listing_member("launcher", 1, role="launcher", slots=0),
            listing_member("empty", 2, slots=0),
            listing_member("leaver", 3),
            listing_member("stale", 5),
            listing_member("fine", 6),
            drains={"uid-leaver": Drain("uid-leaver", "leaver", "node pressure", "preStop")},
            incarnations={"stale": Incarnation("stale", 8, "uid-stale")},
        )
    )
    assert names(listing.listed) == ["fine"]
    assert set(listing.excluded) == {"launcher", "empty", "leaver", "stale"}
    assert "node pressure" in listing.excluded["leaver"]


def test_i6_a_stale_incarnation_is_not_listed() -> None:
    old = listing_member("w-0", 5)
    listing = listing_of(snapshot(old, incarnations={"w-0": Incarnation("w-0", 6, "new-pod")}))
    assert listing.listed == ()
    assert "incarnation 6" in listing.excluded["w-0"]


def test_a_member_below_min_is_listed_all_the_same_and_the_sentence_says_so() -> None:
    listing = listing_of(snapshot(listing_member("w-0", 1), job=Job(JobPolicy(2, 3))))
    assert names(listing.listed) == ["w-0"]
    assert "1 short of min" in listing.reason


def test_only_a_size_that_is_allowed_is_listed_unless_none_can_be() -> None:
    members = [listing_member(f"w-{n}", n + 1, version="0.2.0") for n in range(6)]
    for job, listed, said in (
        (
            Job(JobPolicy(1, 8, unit=4)),
            4,
            "4 listed of min 1 and max 8, in multiples of 4, 2 on standby",
        ),
        (Job(JobPolicy(1, 8, sizes=(2, 5))), 5, "1 on standby"),
        (Job(JobPolicy(1, 9, unit=8)), 6, "2 short of 8, the smallest size"),
    ):
        listing = listing_of(snapshot(*members, job=job))
        assert len(listing.listed) == listed
        assert listing.reason.endswith(said)
        # One of 0.1.0 knows no sizes, and lets all six in.
        old = replace(members[5], version="")
        assert len(listing_of(snapshot(*members[:5], old, job=job)).listed) == 6


MEMBERS = st.lists(
    st.builds(
        listing_member,
        st.sampled_from([f"w-{n}" for n in range(8)]),
        st.integers(1, 20),
        slots=st.integers(0, 2),
        role=st.sampled_from(["worker", "launcher"]),
        max_workers=st.sampled_from([3, 4]),
    ),
    unique_by=lambda m: m.name,
)


@given(MEMBERS, st.integers(1, 5), st.sampled_from([1, 2, 3]))
def test_everybody_is_in_exactly_one_place(members: list[Member], room: int, unit: int) -> None:
    found = snapshot(*members, job=Job(JobPolicy(1, room, unit=unit)))
    listing = listing_of(found)
    places = [*names(listing.listed), *names(listing.standby), *listing.excluded]
    assert sorted(places) == sorted(found.members)
    assert len(listing.listed) <= room
    assert listing_of(found) == listing


@given(st.sets(st.sampled_from("abcd")), st.sampled_from(["", "committed", "expired"]))
def test_i2_who_drains_is_not_listed_however_its_drain_ended(
    leavers: set[str], outcome: Literal["", "committed", "expired"]
) -> None:
    drains = {f"uid-{n}": Drain(f"uid-{n}", n, "spot", "hand", outcome=outcome) for n in leavers}
    members = [listing_member(name, at) for at, name in enumerate("abcd", 1)]
    listing = listing_of(snapshot(*members, drains=drains))
    assert leavers.isdisjoint(names(listing.listed + listing.standby))
    assert leavers <= set(listing.excluded)


def test_i2_a_new_pod_of_the_same_name_starts_undrained() -> None:
    drains = {"uid-before": Drain("uid-before", "w-0", "spot", "hand", outcome="committed")}
    assert names(listing_of(snapshot(listing_member("w-0", 9), drains=drains)).listed) == ["w-0"]


def test_who_trains_has_a_place_before_an_older_one_and_who_asks_before_one_that_does_not() -> None:
    pods = snapshot(*(listing_member(name, age) for age, name in enumerate("abcde", 1)))
    assert names(listing_of(pods).listed) == ["a", "b", "c"]
    listing = listing_of(pods, Places(frozenset("ce"), frozenset("d")))
    assert names(listing.listed) == ["c", "e", "d"]
    assert names(listing.standby) == ["a", "b"]


def test_a_place_is_no_reason_to_list_who_drains() -> None:
    pods = snapshot(listing_member("a", 1), drains={"uid-a": Drain("uid-a", "a", "spot", "hand")})
    assert listing_of(pods, Places(frozenset("a"))).listed == ()


NAMES = st.text(min_size=1, max_size=20)


@given(NAMES, NAMES, NAMES, NAMES)
def test_no_name_reaches_out_of_its_place(ns: str, job: str, member: str, run: str) -> None:
    keys = JobKeys(ns, job)
    generation = keys.in_generation(3)
    node = generation.run(run).node(member)
    assert node.startswith(generation.prefix)
    assert node.count("/") == JobKeys("a", "b").in_generation(3).run("c").node("d").count("/")
    assert last_name(node) == member
    assert generation.run_id_of(node) == run


@given(st.binary(max_size=40), NAMES)
def test_a_launchers_key_comes_back_as_it_was(key: bytes, adder: str) -> None:
    run = JobKeys("ns", "job").in_generation(1).run("r")
    assert run.split(run.value(key)) == ("kv", key, "")
    assert run.split(run.addend(key, adder)) == ("sum", key, adder)
    assert run.split(run.element(key, adder)) == ("queue", key, adder)


def test_the_layout_is_the_documented_one() -> None:
    keys = JobKeys("team", "digits")
    generation = keys.in_generation(2)
    assert keys.job == "/muster/v1/team/digits/job"
    assert keys.incarnation("w-0") == "/muster/v1/team/digits/incarnations/w-0"
    assert keys.last_commit == "/muster/v1/team/digits/last_commit"
    assert generation.commit == "/muster/v1/team/digits/g/2/commit"
    assert generation.vote(7, "w-0") == "/muster/v1/team/digits/g/2/commit/7/w-0"
    assert not generation.commit.startswith(generation.votes)
    assert generation.member("w-0") == "/muster/v1/team/digits/g/2/members/w-0"
    assert generation.run("r").round == "/muster/v1/team/digits/g/2/c10d/r/round"
    assert generation.run("r").node("w-0") == "/muster/v1/team/digits/g/2/c10d/r/nodes/w-0"


@given(NAMES, st.binary(max_size=8))
def test_a_round_is_told_from_whatever_launchers_call_one(run_id: str, key: bytes) -> None:
    life = JobKeys("ns", "job").in_generation(2)
    run = life.run(run_id)
    assert life.run_of_round(run.round) == run_id
    others = [run.value(name) for name in (b"round", b"a/round", key)]
    others += [run.node("round"), run.addend(b"round", "round"), run.prefix, f"{life.runs}round"]
    others += [f"{life.runs}/round", f"{life.runs}%72un/round", f"{life.runs}%FF/round"]
    others += [life.job.in_generation(1).run(run_id).round, life.member("round")]
    assert [life.run_of_round(other) for other in others] == [None] * len(others)


@given(st.binary(max_size=40), NAMES)
def test_every_key_of_the_layout_is_taken_for_one(key: bytes, name: str) -> None:
    keys = JobKeys(name, name)
    life = keys.in_generation(3)
    run = life.run(name)
    for spelling in (
        keys.job,
        keys.last_commit,
        keys.incarnation(name),
        keys.history_entry(7, name, name),
        keys.probe(name),
        life.member(name),
        life.drain(name),
        life.commit,
        life.vote(7, name),
        life.pod_saves(name),
        life.bypass(name),
        life.failure(name),
        run.round,
        run.node(name),
        run.value(key),
        run.addend(key, name),
        run.element(key, name),
        run.operation(name),
    ):
        assert spelled(spelling[len(keys.prefix) :]), spelling


@given(st.text(st.sampled_from("%0123456789ABCDEFacefgpz~-_.+"), min_size=1, max_size=12))
def test_a_name_has_one_spelling(name: str) -> None:
    assert spelled(f"incarnations/{name}") == (quote(unquote_to_bytes(name), safe="") == name)


@pytest.mark.parametrize("key", [b"/a b%\xff", b"", b"/" * 2000, b"/n\xc3\xa4" * 60])
def test_a_launchers_key_is_found_in_its_spelling_however_long(key: bytes) -> None:
    run = JobKeys("team", "digits").in_generation(1).run("r")
    for _ in range(2):
        assert run.split(run.value(key)) == ("kv", key, "")
        assert run.split(run.addend(key, "a:1")) == ("sum", key, "a:1")


@pytest.mark.parametrize("key", ["/muster/v1/\udc80/x/job", "/muster/v1/a/\udc80/job"])
def test_a_key_of_a_name_that_is_no_utf_8_is_no_jobs(key: str) -> None:
    assert job_of(key) is None
    assert not spelled_of_any_job(key.removeprefix(ROOT))


def test_a_page_that_does_not_come_is_made_smaller_and_then_waited_for_longer() -> None:
    tried = [Paging()]
    for _ in range(7):
        tried.append(tried[-1].after_timeout())
    assert [one.keys for one in tried] == [500, 125, 31, 16, 16, 16, 16, 16]
    assert [one.timeout_s for one in tried] == [2, 2, 2, 2, 4, 8, 8, 8]


def test_pages_that_come_quickly_grow_again() -> None:
    paging = Paging(LEAST_KEYS, LONGEST_S)
    for _ in range(6):
        paging = paging.after_answer(0.01)
    assert paging == Paging()


def test_a_page_that_just_came_is_asked_for_like_that_again() -> None:
    paging = Paging(125, LONGEST_S)
    assert paging.after_answer(0.9 * LONGEST_S / 2) == paging


@given(st.lists(st.none() | st.floats(0, LONGEST_S), max_size=40))
def test_a_page_stays_within_its_bounds(answers: list[float | None]) -> None:
    paging = Paging()
    for took_s in answers:
        paging = paging.after_timeout() if took_s is None else paging.after_answer(took_s)
        assert LEAST_KEYS <= paging.keys <= MOST_KEYS
        assert DEFAULT_TIMEOUT_S <= paging.timeout_s <= LONGEST_S


@pytest.mark.parametrize("bytes_per_s", [2e3, 2e4, 2e5, 2e6])
def test_a_page_comes_to_fit_a_line_of_any_speed(bytes_per_s: float) -> None:
    key_bytes, read, paging, calls = 500, 0, Paging(), 0
    while read < 3000:
        calls += 1
        took_s = paging.keys * key_bytes / bytes_per_s
        if took_s > paging.timeout_s / 2:
            paging = paging.after_timeout()
        else:
            read += paging.keys
            paging = paging.after_answer(took_s)
    # Not many in vain: one in a few, of those that the line can carry at all.
    carried = 3000 / min(MOST_KEYS, max(LEAST_KEYS, QUICK * LONGEST_S * bytes_per_s / key_bytes))
    assert calls < 10 + 3 * carried


KEYS = JobKeys("team", "digits")
HERE = KEYS.in_generation(1)
SNAPSHOT_JOB = kv(KEYS.job, 3, Job(JobPolicy(1, 2)).to_json())
HOLD = kv(HERE.commit, 9, Commit(5, "run", 3, "hold").to_json())
GOOD = member("w-1", most=2).to_json()


def voted(name: str, epoch: int, revision: int = 9) -> WatchEvent:
    value = Vote(epoch, 3, f"uid-{name}", 9).to_json()
    return WatchEvent("put", kv(HERE.vote(epoch, name), revision, value))


def test_a_corrupt_record_is_left_out_and_named() -> None:
    bad = kv(HERE.member("w-0"), 3, b"\xff\x00")
    snapshot = snapshot_of(
        KEYS, RangeResult(9, (SNAPSHOT_JOB, bad, kv(HERE.member("w-1"), 3, GOOD)))
    )
    assert list(snapshot.members) == ["w-1"]
    assert list(snapshot.corrupt) == [HERE.member("w-0")]


def test_i8_unreadable_records_keep_their_revision_for_who_writes_them_anew() -> None:
    kvs = (kv(KEYS.job, 3, b"{"), kv(KEYS.incarnation("w-0"), 4, b"[]"))
    snapshot = snapshot_of(KEYS, RangeResult(9, kvs))
    assert snapshot.job is None
    assert snapshot.unreadable_job == 3
    assert snapshot.unreadable_incarnations == {"w-0": 4}


def test_a_launchers_key_named_like_a_section_is_no_member() -> None:
    added = kv(HERE.run("r").addend(b"members", "w-0"), 3, b"1 #1")
    snapshot = snapshot_of(KEYS, RangeResult(9, (SNAPSHOT_JOB, added)))
    assert (snapshot.members, snapshot.corrupt) == ({}, {})


def test_members_of_another_generation_are_not_in_the_snapshot() -> None:
    later = kv(KEYS.job, 3, Job(JobPolicy(1, 2), generation=2).to_json())
    ghost = kv(HERE.member("w-1"), 3, GOOD)
    assert snapshot_of(KEYS, RangeResult(9, (later, ghost))).members == {}


def test_the_membership_shows_commit_last_commit_and_the_votes_of_the_present_epoch() -> None:
    mirror = Mirror(KEYS.prefix, clock=lambda: 0.0)
    membership = Membership(KEYS, mirror)
    last = LastCommit(7, 2, 4)
    votes_of_two = [voted("a", 5).kv, voted("b", 4).kv]
    mirror.replace([SNAPSHOT_JOB, kv(KEYS.last_commit, 9, last.to_json()), HOLD, *votes_of_two], 20)
    snapshot, votes = membership.snapshot(), membership.votes()
    assert snapshot.commit is not None
    assert snapshot.commit.phase == "hold"
    assert snapshot.last_commit == replace(last, mod_revision=9)
    assert list(votes) == ["a"]
    mirror.apply([voted("b", 5, 21)], 21)
    assert membership.snapshot() is snapshot
    assert set(membership.votes()) == {"a", "b"}
    mirror.apply([WatchEvent("put", kv(HERE.commit, 22, b"junk"))], 22)
    assert membership.snapshot().commit is None
    assert membership.snapshot().unreadable_commit == 22
    assert not membership.votes()


def test_members_that_come_and_go_leave_the_votes_as_they_were() -> None:
    mirror = Mirror(KEYS.prefix, clock=lambda: 0.0)
    membership = Membership(KEYS, mirror)
    mirror.replace([SNAPSHOT_JOB, HOLD, voted("a", 5).kv], 20)
    snapshot, votes = membership.snapshot(), membership.votes()
    holder = Incarnation("b", 1, "uid-b")
    for event in [
        WatchEvent("put", kv(HERE.member("b"), 21, member("b", most=2).to_json())),
        WatchEvent("put", kv(KEYS.incarnation("b"), 21, holder.to_json())),
        WatchEvent("put", kv(HERE.drain("uid-b"), 21, drain("b").to_json())),
        WatchEvent("delete", kv(HERE.member("b"), 21, b"")),
    ]:
        mirror.apply([event], 21)
        assert membership.snapshot() is not snapshot
        assert membership.votes() is votes
    mirror.apply([WatchEvent("put", kv(HERE.commit, 22, Commit(6).to_json()))], 22)
    assert not membership.votes()


@pytest.mark.parametrize(
    ("saved_by", "present", "former"),
    [("old", "new", True), ("same", "same", False), ("", "new", False), ("old", "", False)],
)
def test_only_another_uid_makes_a_last_commit_one_of_a_former_life(
    saved_by: str, present: str, former: bool
) -> None:
    last = LastCommit(7, 2, 4, job_uid=saved_by)
    job = Job(JobPolicy(1, 2), generation=5, uid=present)
    assert Snapshot(9, job, last_commit=last).commit_is_of_former_life is former


@pytest.mark.parametrize("forgotten", [False, True])
def test_what_is_forgotten_is_not_started_from(forgotten: bool) -> None:
    last = LastCommit(7, 2, 4, forgotten=forgotten)
    started_from = Snapshot(9, Job(JobPolicy(1, 2)), last_commit=last).commit_to_start_from
    assert started_from == (None if forgotten else last)
