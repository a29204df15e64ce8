# SPDX-License-Identifier: Apache-2.0
"""The records of a rendezvous in the store, and whatever else may be found there."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.c10d.rounds.mirrored_run import MirroredRun
from launcher_shim.c10d.rounds.records import INT64_MAX, ROUNDS_PER_LIFE, Node, Round, Seat
from rdzv.errors import RecordError
from rdzv.keys import JobKeys
from rdzv.store import KeyValue, WatchEvent

KEYS = JobKeys("team", "digits")
RUN = KEYS.in_generation(1).run("digits")
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
COUNTS = st.integers(0, INT64_MAX)
SEATS = st.builds(Seat, NAMES, st.text(max_size=5), COUNTS)
JUNK = st.binary(max_size=60) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["schema", "state", "round", "frozen", "closed", "complete", "ask"])
            | st.text(max_size=4),
            inner,
            max_size=8,
        )
    ),
    max_leaves=12,
).map(lambda value: json.dumps(value).encode())


def kv(key: str, value: bytes) -> KeyValue:
    return KeyValue(key, value, 3, 7, 1, 0)


@given(
    st.builds(
        Node,
        NAMES,
        st.sampled_from(["asking", "in"]),
        st.text(max_size=20),
        COUNTS,
        st.text(max_size=20),
        COUNTS,
        COUNTS,
        mod_revision=st.just(7),
    )
)
def test_a_node_comes_back_as_it_was(node: Node) -> None:
    assert Node.from_kv(kv(RUN.node(node.member), node.to_json())) == node


def test_whether_a_node_has_finished_is_written_of_its_round_alone() -> None:
    inside = Node("a", "in", "n", 1, "10.0.0.1", 7, 0, 3, mod_revision=7)
    done = replace(inside, finished=True)
    assert Node.from_kv(kv(RUN.node("a"), done.to_json())) == done
    assert b"finished" not in inside.to_json()
    left = replace(done, state="left", left_reason="done")
    assert not Node.from_kv(kv(RUN.node("a"), left.to_json())).finished
    assert done.is_later_than(inside)
    assert not inside.is_later_than(done)


@given(
    st.builds(
        Round,
        COUNTS,
        st.booleans(),
        st.sampled_from(["", "success", "failure"]),
        st.booleans(),
        st.lists(SEATS, max_size=5, unique_by=lambda seat: seat.member).map(tuple),
        st.just(7),
        restored=st.booleans(),
    )
)
def test_a_round_comes_back_as_it_was(one: Round) -> None:
    assert Round.from_kv(kv(RUN.round, one.to_json())) == one


@given(JUNK)
def test_junk_is_refused_and_nothing_else_happens(junk: bytes) -> None:
    for record, key in ((Node, RUN.node("a")), (Round, RUN.round)):
        try:
            read = record.from_kv(kv(key, junk))
        except RecordError:
            continue
        assert read.mod_revision == 7


@pytest.mark.parametrize(
    "change",
    [
        {"state": "elsewhere"},
        {"state": []},
        {"ask": True},
        {"ask": -1},
        {"pid": "7"},
        {"nonce": None},
        {"left_reason": "bored"},
        {"round": 2**70},
        {"flavour": 3},
        {"finished": 1},
        {"schema": 2},
    ],
)
def test_a_node_of_the_wrong_shape(change: dict[str, object]) -> None:
    fields = json.loads(Node("a", "in", "n", 1, "10.0.0.1", 7, 0).to_json())
    with pytest.raises(RecordError):
        Node.from_kv(kv(RUN.node("a"), json.dumps(fields | change).encode()))


@pytest.mark.parametrize(
    "change",
    [
        {"frozen": [["a", "n", 1], ["a", "n", 2]]},
        {"frozen": [["a", "n"]]},
        {"frozen": "abc"},
        {"closed": "perhaps"},
        {"closed": {}},
        {"complete": 1},
        {"restored": 1},
        {"round": None},
    ],
)
def test_a_round_of_the_wrong_shape(change: dict[str, object]) -> None:
    fields = json.loads(Round(3, True, frozen=(Seat("a", "n", 1),)).to_json())
    with pytest.raises(RecordError):
        Round.from_kv(kv(RUN.round, json.dumps(fields | change).encode()))


def test_a_frozen_list_of_a_thousand_fits_its_key() -> None:
    frozen = tuple(Seat(f"digits-worker-{n}", f"{n:016x}", 12) for n in range(1000))
    assert len(Round(3, True, frozen=frozen).to_json()) < 64 * 1024


def test_of_two_rounds_the_later_one_wins() -> None:
    open_, world = Round(3), Round(3, True, frozen=(Seat("a", "n", 1),))
    assert open_.age < world.age < Round(3, True, finishing=True).age < Round(4).age


def test_no_round_of_one_life_has_the_number_of_one_of_another() -> None:
    first = MirroredRun(KEYS.in_generation(1).run("digits"))
    run = MirroredRun(KEYS.in_generation(3).run("digits"))
    assert (first.round, first.round.is_first) == (Round(0), True)
    assert (run.round, run.round.is_first) == (Round(2 * ROUNDS_PER_LIFE), True)
    run.apply(WatchEvent("put", KeyValue(run.keys.round, b"junk", 5, 7, 1, 0)))
    assert run.round == Round(2 * ROUNDS_PER_LIFE, mod_revision=7)
    assert not Round(2 * ROUNDS_PER_LIFE + 1).is_first
