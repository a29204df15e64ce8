# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.errors import RecordError
from rdzv.keys import JobKeys
from rdzv.membership import snapshot_of
from rdzv.records.drain import Drain
from rdzv.records.job import Incarnation, Job, Member
from rdzv.store import KeyValue, RangeResult

KEYS = JobKeys("ns", "job")
TEXT = st.text(max_size=12)


def kv(key: str, value: bytes, revision: int = 3) -> KeyValue:
    return KeyValue(key, value, revision, revision, 1, 0)


@given(
    st.builds(Job, st.integers(), st.integers(), st.integers(), TEXT, st.none() | st.integers())
    | st.builds(Incarnation, TEXT, st.integers(), TEXT)
    | st.builds(Drain, TEXT, TEXT, TEXT, TEXT)
    | st.builds(
        Member,
        TEXT,
        TEXT,
        st.integers(),
        TEXT,
        TEXT,
        st.sampled_from(["worker", "launcher"]),
        st.integers(),
        st.integers(),
        st.integers(),
        index=st.integers(-1, 99),
    )
)
def test_records_come_back_as_they_were(record: Job | Incarnation | Drain | Member) -> None:
    back = type(record).from_kv(kv("k", record.to_json(), revision=0))
    assert back == record


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | TEXT,
        lambda inner: st.dictionaries(TEXT, inner, max_size=3) | st.lists(inner, max_size=3),
    ).map(lambda value: json.dumps(value).encode())
)
def test_i8_junk_is_a_record_error_and_nothing_else(junk: bytes) -> None:
    for kind in (Job, Member, Incarnation, Drain):
        with pytest.raises(RecordError):
            kind.from_kv(kv("k", junk))


def test_a_job_record_of_an_earlier_version_has_no_former_uids() -> None:
    fields = json.loads(Job(1, 2, former_uids=("a", "b")).to_json())
    assert Job.from_kv(kv("k", json.dumps(fields).encode())).former_uids == ("a", "b")
    del fields["former_uids"]
    assert Job.from_kv(kv("k", json.dumps(fields).encode())).former_uids == ()
    with pytest.raises(RecordError, match="former_uids"):
        Job.from_kv(kv("k", json.dumps({**fields, "former_uids": [1]}).encode()))


def test_i8_a_deeply_nested_record_is_refused() -> None:
    with pytest.raises(RecordError):
        Job.from_kv(kv("k", b"[" * 100_000))


def test_a_corrupt_record_is_left_out_and_named() -> None:
    generation = KEYS.in_generation(1)
    good = Member("w-1", "u", 1, "a", "n", "worker", 1, 1, 2)
    kvs = (
        kv(KEYS.job, Job(1, 2).to_json()),
        kv(generation.member("w-0"), b"\xff\x00"),
        kv(generation.member("w-1"), good.to_json()),
    )
    snapshot = snapshot_of(KEYS, RangeResult(9, kvs))
    assert list(snapshot.members) == ["w-1"]
    assert list(snapshot.corrupt) == [generation.member("w-0")]


def test_i8_unreadable_records_keep_their_revision_for_who_writes_them_anew() -> None:
    kvs = (kv(KEYS.job, b"{"), kv(KEYS.incarnation("w-0"), b"[]"))
    snapshot = snapshot_of(KEYS, RangeResult(9, kvs))
    assert snapshot.job is None
    assert snapshot.unreadable_job == kvs[0].mod_revision
    assert snapshot.unreadable_incarnations == {"w-0": kvs[1].mod_revision}


def test_a_launchers_key_named_like_a_section_is_no_member() -> None:
    run = KEYS.in_generation(1).run("r")
    kvs = (kv(KEYS.job, Job(1, 2).to_json()), kv(run.addend(b"members", "w-0"), b"1 #1"))
    snapshot = snapshot_of(KEYS, RangeResult(9, kvs))
    assert snapshot.members == {}
    assert snapshot.corrupt == {}


def test_members_of_another_generation_are_not_in_the_snapshot() -> None:
    ghost = Member("w-0", "u", 1, "a", "n", "worker", 1, 1, 2)
    kvs = (
        kv(KEYS.job, Job(1, 2, generation=2).to_json()),
        kv(KEYS.in_generation(1).member("w-0"), ghost.to_json()),
    )
    assert snapshot_of(KEYS, RangeResult(9, kvs)).members == {}
