# SPDX-License-Identifier: Apache-2.0
"""Records as the store has them: older ones are read, and what is none is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.c10d.rounds.mirrored_run import MirroredRun
from launcher_shim.c10d.rounds.records import Node, Round, Seat
from rdzv.drain.transactions import vote_transaction
from rdzv.errors import RecordError
from rdzv.keys import JobKeys
from rdzv.records.drain import Commit, Drain, LastCommit, Vote
from rdzv.records.job import ROUNDS_PER_LIFE, Incarnation, Job, Member
from rdzv.records.policy import JobPolicy
from rdzv.records.progress import PodSaves
from rdzv.records.quarantine import Quarantine
from rdzv.store import Compare, WatchEvent
from tests.support.records import kv, node, world

KEYS = JobKeys("team", "digits")
HERE = KEYS.in_generation(1)
RUN = HERE.run("digits")
TEXT = st.text(max_size=8)
GOOD: dict[type[Any], Any] = {
    Job: Job(JobPolicy(1, 2, sizes=(1, 2), unit=2, gather_s=2.5), paused=True),
    Member: Member("c", "u", 1, "a", "n", "worker", 1, 1, 2),
    Incarnation: Incarnation("c", 1, "u"),
    Drain: Drain("c", "m", "r", "s"),
    Commit: Commit(),
    Vote: Vote(1, 1, "u", None),
    LastCommit: LastCommit(7, 2, 4),
    PodSaves: PodSaves("c", "uid-c", "run", 2, (40, 20), 40),
    Node: node("a", "in", number=0),
    Round: world("a"),
    Quarantine: Quarantine("c", "uid-c", 3, "third", out=True),
}


def read(record: Any, value: bytes | None = None) -> Any:
    """What is read of a record, or of another value in its place."""
    key = RUN.node(record.member) if isinstance(record, Node) else HERE.member("c")
    return type(record).from_kv(kv(key, 9, record.to_json() if value is None else value))


JUNK = st.binary(max_size=60) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["schema", "state", "round", "frozen", "closed", "complete", "ask"])
            | TEXT,
            inner,
            max_size=8,
        )
    ),
    max_leaves=12,
).map(lambda value: json.dumps(value).encode())


@given(JUNK, st.dictionaries(TEXT, st.none() | st.integers() | TEXT))
def test_i8_junk_is_refused_and_nothing_else_happens(junk: bytes, fields: dict[str, Any]) -> None:
    for good in GOOD.values():
        for value in (junk, json.dumps({"schema": 1, **fields}).encode()):
            with pytest.raises(RecordError):
                read(good, value)


def test_i8_a_deeply_nested_record_is_refused() -> None:
    with pytest.raises(RecordError):
        read(GOOD[Job], b"[" * 100_000)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (Commit, "phase", "holding"),
        (Commit, "leaving", [1]),
        (Commit, "epoch", -1),
        (Vote, "vote", "yes"),
        (LastCommit, "at_unix_s", -1.0),
        (LastCommit, "at_unix_s", float("nan")),
        (LastCommit, "cursor", "x" * 1025),
        (LastCommit, "samples", "perhaps"),
        (Vote, "samples", "not kept: " + "x" * 81),
        (Vote, "ranks", ["0"]),
        (PodSaves, "cursors", ["{}"]),
        (PodSaves, "steps", ["40"]),
        (PodSaves, "steps", [True]),
        (PodSaves, "steps", list(range(9))),
        (PodSaves, "newest", "40"),
        (Drain, "outcome", "lost"),
        (Drain, "seconds_left", float("nan")),
        (Job, "former_uids", [1]),
        (Member, "version", 1),
        (Member, "name", "w"),
        (Member, "name", ""),
        (Member, "pod_uid", ""),
        (Incarnation, "member", "w"),
        (Drain, "pod_uid", "u"),
        (Drain, "member", ""),
        (Member, "topology", 1),
        (Quarantine, "deaths", 0),
        (Quarantine, "out", "x"),
        (Node, "state", "elsewhere"),
        (Node, "state", []),
        (Node, "ask", True),
        (Node, "ask", -1),
        (Node, "pid", "7"),
        (Node, "nonce", None),
        (Node, "left_reason", "bored"),
        (Node, "round", 2**70),
        (Node, "flavour", 3),
        (Node, "finished", 1),
        (Node, "schema", 2),
        (Round, "frozen", [["a", "n", 1], ["a", "n", 2]]),
        (Round, "frozen", [["a", "n"]]),
        (Round, "frozen", "abc"),
        (Round, "closed", "perhaps"),
        (Round, "closed", {}),
        (Round, "complete", 1),
        (Round, "restored", 1),
        (Round, "round", None),
    ],
)
def test_i8_a_field_of_the_wrong_shape_is_refused(kind: type[Any], field: str, value: Any) -> None:
    fields = json.loads(GOOD[kind].to_json())
    assert read(GOOD[kind], json.dumps(fields).encode()) is not None
    with pytest.raises(RecordError):
        read(GOOD[kind], json.dumps(fields | {field: value}).encode())


@pytest.mark.parametrize("good", GOOD.values(), ids=lambda good: type(good).__name__)
def test_i8_a_record_with_half_of_a_surrogate_pair_is_refused(good: Any) -> None:
    # Legal JSON, and nothing that a key, a host list or a hash could be made of.
    for text in ("\ud800", ["\udc00"], {"\ud800": 1}):
        fields = json.loads(good.to_json()) | {"what": text}
        with pytest.raises(RecordError):
            read(good, json.dumps(fields).encode())
    whole = json.dumps(json.loads(good.to_json()) | {"what": "\U0001f40d"})
    assert "\\ud83d\\udc0d" in whole
    assert read(good, whole.encode()) == read(good)


@pytest.mark.parametrize(
    ("older", "expected"),
    [
        (
            b'{"schema":1,"pod_uid":"c","member":"m","reason":"r","source":"s"}',
            Drain("c", "m", "r", "s", mod_revision=9, created_revision=9),
        ),
        (
            b'{"schema":1,"name":"c","pod_uid":"u","incarnation":1,"address":"a","node":"n",'
            b'"role":"worker","slots":1,"min":1,"max":2}',
            Member("c", "u", 1, "a", "n", "worker", 1, 1, 2, created_revision=9, mod_revision=9),
        ),
        (
            b'{"schema":1,"min":1,"max":2,"generation":1,"uid":"","vacated":false}',
            Job(JobPolicy(1, 2), mod_revision=9),
        ),
        (b'{"schema":1,"step":7,"round":2,"epoch":4}', LastCommit(7, 2, 4, mod_revision=9)),
        (
            b'{"schema":1,"round":4,"complete":false,"closed":"","finishing":false,"frozen":[]}',
            Round(4, mod_revision=9),
        ),
    ],
)
def test_a_record_of_an_older_writer_is_read(older: bytes, expected: Any) -> None:
    assert read(GOOD[type(expected)], older) == expected


def test_whether_a_node_has_finished_is_written_of_its_round_alone() -> None:
    inside = node("a", "in", revision=9)
    done = replace(inside, finished=True)
    assert read(done) == done
    assert b"finished" not in inside.to_json()
    assert not read(replace(done, state="left", left_reason="done")).finished
    assert done.is_later_than(inside)
    assert not inside.is_later_than(done)


def test_a_frozen_list_of_a_thousand_fits_its_key() -> None:
    frozen = tuple(Seat(f"digits-worker-{n}", f"{n:016x}", 12) for n in range(1000))
    assert len(Round(3, True, frozen=frozen).to_json()) < 64 * 1024


def test_of_two_rounds_the_later_one_wins() -> None:
    assert Round(3).age < world("a").age < world("a", finishing=True).age < Round(4).age


def test_no_round_of_one_life_has_the_number_of_one_of_another() -> None:
    first = MirroredRun(RUN)
    run = MirroredRun(KEYS.in_generation(3).run("digits"))
    assert (first.round, first.round.is_first) == (Round(0), True)
    assert (run.round, run.round.is_first) == (Round(2 * ROUNDS_PER_LIFE), True)
    run.apply(WatchEvent("put", kv(run.keys.round, 7, b"junk")))
    assert run.round == Round(2 * ROUNDS_PER_LIFE, mod_revision=7)
    assert not Round(2 * ROUNDS_PER_LIFE + 1).is_first


def test_a_vote_is_created_once_and_only_in_its_hold() -> None:
    vote, commit = Vote(5, 3, "uid-a", 9), Commit(5, mod_revision=60)
    key = HERE.vote(5, "a")
    compares = vote_transaction(HERE, "a", vote, commit, None)[0]
    assert compares == [Compare(key, "mod", "=", 0), Compare(HERE.commit, "mod", "=", 60)]
    acknowledged = replace(vote, acked=10, mod_revision=80)
    drain = Drain("uid-a", "a", "r", "s", mod_revision=70)
    for known, revision in ((None, 0), (drain, 70)):
        assert vote_transaction(HERE, "a", acknowledged, commit, known)[0] == [
            Compare(key, "mod", "=", 80),
            Compare(HERE.drain("uid-a"), "mod", "=", revision),
        ]


def test_people_read_a_rounds_number_from_0_in_each_life() -> None:
    assert [Round(n).shown for n in (0, 7, ROUNDS_PER_LIFE, 3 * ROUNDS_PER_LIFE + 12)] == [
        *(0, 7),
        *(0, 12),
    ]
