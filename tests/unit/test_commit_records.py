# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.errors import RecordError
from rdzv.keys import JobKeys
from rdzv.membership import Membership
from rdzv.mirror import Mirror
from rdzv.records.commit import Commit, LastCommit, Vote, vote_transaction
from rdzv.records.drain import Drain
from rdzv.records.job import Incarnation, Job
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, KeyValue, WatchEvent
from tests.support import records

KEYS = JobKeys("team", "digits")
HERE = KEYS.in_generation(1)
TEXT = st.text(max_size=8)
COUNT = st.integers(0, 2**60)
PODS = st.lists(TEXT).map(tuple)
RECORDS = (
    st.builds(
        Commit, COUNT, TEXT, COUNT, st.sampled_from(["idle", "hold", "commit", "done", "void"]),
        st.none() | st.integers(), PODS, PODS, PODS, st.booleans(), st.booleans(), st.booleans(),
        COUNT, st.integers(0, 10**6).map(float), TEXT,
    )
    | st.builds(
        Vote, COUNT, COUNT, TEXT, st.none() | st.integers(), st.none() | st.integers(), TEXT
    )
    | st.builds(LastCommit, st.integers(), COUNT, COUNT, TEXT, st.booleans())
    | st.builds(
        Drain, TEXT, TEXT, TEXT, TEXT, st.none() | st.floats(0, 1e6), st.floats(0, 5), TEXT,
        st.sampled_from(["", "committed", "uncommitted", "expired"]), st.none() | st.integers(),
    )
)  # fmt: skip


def kv(key: str, value: bytes, mod: int = 9) -> KeyValue:
    return KeyValue(key, value, 4, mod, 1, 0)


@given(RECORDS)
def test_a_record_comes_back_as_it_was(record: Commit | Vote | LastCommit | Drain) -> None:
    read = type(record).from_kv(kv("k", record.to_json()))
    assert read.mod_revision == 9
    assert read.to_json() == record.to_json()


@pytest.mark.parametrize("kind", [Commit, Vote, LastCommit, Drain])
@given(st.dictionaries(TEXT, st.none() | st.integers() | TEXT))
def test_i8_other_fields_are_no_record(
    kind: type[Commit | Vote | LastCommit | Drain], fields: dict[str, object]
) -> None:
    with pytest.raises(RecordError, match="k: "):
        kind.from_kv(kv("k", repr({"schema": 1, **fields}).replace("'", '"').encode()))


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        (Commit(), b'"idle"', b'"holding"'),
        (Commit(), b'"leaving":[]', b'"leaving":[1]'),
        (Commit(), b'"epoch":0', b'"epoch":-1'),
        (Vote(1, 1, "u", None), b'"no"', b'"yes"'),
        (Drain("u", "m", "r", "s"), b'"outcome":""', b'"outcome":"lost"'),
        (Drain("u", "m", "r", "s"), b'"seconds_left":null', b'"seconds_left":NaN'),
    ],
)
def test_i8_a_field_out_of_its_range_is_refused(
    kind: Commit | Vote | Drain, old: bytes, new: bytes
) -> None:
    content = kind.to_json()
    assert old in content
    with pytest.raises(RecordError):
        type(kind).from_kv(kv("k", content.replace(old, new)))


def test_a_drain_of_an_older_writer_is_read() -> None:
    value = b'{"schema":1,"pod_uid":"u","member":"m","reason":"r","source":"s"}'
    assert Drain.from_kv(kv("k", value, 0)) == Drain("u", "m", "r", "s", created_revision=4)


def test_a_vote_is_created_once_and_only_in_its_hold() -> None:
    vote, commit = Vote(5, 3, "uid-a", 9), Commit(5, mod_revision=60)
    key = HERE.vote(5, "a")
    compares = vote_transaction(HERE, "a", vote, commit)[0]
    assert compares == [Compare(key, "mod", "=", 0), Compare(HERE.commit, "mod", "=", 60)]
    acknowledged = replace(vote, acked=10, mod_revision=80)
    assert vote_transaction(HERE, "a", acknowledged, commit)[0] == [Compare(key, "mod", "=", 80)]


def test_the_membership_shows_commit_last_commit_and_the_votes_of_the_present_epoch() -> None:
    mirror = Mirror(KEYS.prefix, clock=lambda: 0.0)
    membership = Membership(KEYS, mirror)
    last = LastCommit(7, 2, 4)
    mirror.replace(
        [
            kv(KEYS.job, Job(1, 2).to_json()),
            kv(KEYS.last_commit, last.to_json()),
            kv(HERE.commit, Commit(5, "run", 3, "hold").to_json()),
            kv(HERE.vote(5, "a"), Vote(5, 3, "uid-a", 9).to_json()),
            kv(HERE.vote(4, "b"), Vote(4, 3, "uid-b", 9).to_json()),
        ],
        20,
    )
    snapshot, votes = membership.snapshot(), membership.votes()
    assert snapshot.commit is not None
    assert snapshot.commit.phase == "hold"
    assert snapshot.last_commit == replace(last, mod_revision=9)
    assert list(votes) == ["a"]
    voted = kv(HERE.vote(5, "b"), Vote(5, 3, "uid-b", 9).to_json(), 21)
    mirror.apply([WatchEvent("put", voted)], 21)
    assert membership.snapshot() is snapshot
    assert set(membership.votes()) == {"a", "b"}
    mirror.apply([WatchEvent("put", kv(HERE.commit, b"junk", 22))], 22)
    assert membership.snapshot().commit is None
    assert membership.snapshot().unreadable_commit == 22
    assert not membership.votes()


def test_members_that_come_and_go_leave_the_votes_as_they_were() -> None:
    mirror = Mirror(KEYS.prefix, clock=lambda: 0.0)
    membership = Membership(KEYS, mirror)
    mirror.replace(
        [
            kv(KEYS.job, Job(1, 2).to_json()),
            kv(HERE.commit, Commit(5, "run", 3, "hold").to_json()),
            kv(HERE.vote(5, "a"), Vote(5, 3, "uid-a", 9).to_json()),
        ],
        20,
    )
    snapshot, votes = membership.snapshot(), membership.votes()
    member = records.member("b", most=2)
    events = [
        WatchEvent("put", kv(HERE.member("b"), member.to_json(), 21)),
        WatchEvent("put", kv(KEYS.incarnation("b"), Incarnation("b", 1, "uid-b").to_json(), 21)),
        WatchEvent("put", kv(HERE.drain("uid-b"), Drain("uid-b", "b", "r", "s").to_json(), 21)),
        WatchEvent("delete", kv(HERE.member("b"), b"", 21)),
    ]
    for event in events:
        mirror.apply([event], 21)
        assert membership.snapshot() is not snapshot
        assert membership.votes() is votes
    mirror.apply([WatchEvent("put", kv(HERE.commit, Commit(6).to_json(), 22))], 22)
    assert not membership.votes()


def test_a_last_commit_of_an_earlier_version_is_of_this_life_and_not_forgotten() -> None:
    last = LastCommit.from_kv(kv("k", b'{"schema":1,"step":7,"round":2,"epoch":4}'))
    assert (last.job_uid, last.forgotten) == ("", False)
    snapshot = Snapshot(9, Job(1, 2, uid="new"), last_commit=last)
    assert snapshot.commit_to_start_from == last
    assert not snapshot.commit_is_of_former_life


@pytest.mark.parametrize(
    ("saved_by", "present", "former"),
    [("old", "new", True), ("same", "same", False), ("", "new", False), ("old", "", False)],
)
def test_only_another_uid_makes_a_last_commit_one_of_a_former_life(
    saved_by: str, present: str, former: bool
) -> None:
    last = LastCommit(7, 2, 4, job_uid=saved_by)
    job = Job(1, 2, generation=5, uid=present)
    assert Snapshot(9, job, last_commit=last).commit_is_of_former_life is former


def test_what_is_forgotten_is_not_started_from() -> None:
    last = LastCommit(7, 2, 4, forgotten=True)
    assert Snapshot(9, Job(1, 2), last_commit=last).commit_to_start_from is None
