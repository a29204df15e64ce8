# SPDX-License-Identifier: Apache-2.0
"""What a membership shows of what the store has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rdzv.keys import JobKeys
from rdzv.membership import Membership, snapshot_of
from rdzv.mirror import Mirror
from rdzv.records.drain import Commit, LastCommit, Vote
from rdzv.records.job import Incarnation, Job
from rdzv.records.policy import JobPolicy
from rdzv.snapshot import Snapshot
from rdzv.store import RangeResult, WatchEvent
from tests.support.records import drain, kv, member

KEYS = JobKeys("team", "digits")
HERE = KEYS.in_generation(1)
JOB = kv(KEYS.job, 3, Job(JobPolicy(1, 2)).to_json())
HOLD = kv(HERE.commit, 9, Commit(5, "run", 3, "hold").to_json())
GOOD = member("w-1", most=2).to_json()


def voted(name: str, epoch: int, revision: int = 9) -> WatchEvent:
    value = Vote(epoch, 3, f"uid-{name}", 9).to_json()
    return WatchEvent("put", kv(HERE.vote(epoch, name), revision, value))


def test_a_corrupt_record_is_left_out_and_named() -> None:
    bad = kv(HERE.member("w-0"), 3, b"\xff\x00")
    snapshot = snapshot_of(KEYS, RangeResult(9, (JOB, bad, kv(HERE.member("w-1"), 3, GOOD))))
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
    snapshot = snapshot_of(KEYS, RangeResult(9, (JOB, added)))
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
    mirror.replace([JOB, kv(KEYS.last_commit, 9, last.to_json()), HOLD, *votes_of_two], 20)
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
    mirror.replace([JOB, HOLD, voted("a", 5).kv], 20)
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
