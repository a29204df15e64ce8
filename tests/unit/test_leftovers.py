# SPDX-License-Identifier: Apache-2.0
"""Pods that are gone: who is lost, what of them is dropped from the store, and what has to stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.upkeep import orphans
from rdzv.keys import JobKeys
from rdzv.members.gone import KEPT_MIN, kept, leftovers, lost_members
from rdzv.records.job import Job
from rdzv.snapshot import Snapshot
from tests.support.records import kv, member

KEYS = JobKeys("team", "digits")
HERE = KEYS.in_generation(3)
RUN = HERE.run("digits")
NONCE = "0123456789ab"


SNAPSHOT = Snapshot(900, Job(1, 4, generation=3), {"here": member("here"), "x.y": member("x.y")})


def test_names_of_gone_pods_stay_up_to_a_bound_and_the_newest_of_them() -> None:
    gone = [kv(KEYS.incarnation(f"w-{n}"), 1000 - n) for n in range(KEPT_MIN + 3)]
    found = leftovers(KEYS, SNAPSHOT, [*gone, kv(KEYS.incarnation("here"), 1)])
    assert [one.mod_revision for one in found] == [798, 799, 800]


def test_drains_of_gone_pods_stay_up_to_a_bound() -> None:
    gone = [kv(HERE.drain(f"uid-{n}"), n + 1) for n in range(KEPT_MIN + 2)]
    found = leftovers(KEYS, SNAPSHOT, [kv(HERE.drain("uid-here"), 1), *gone])
    assert [one.key for one in found] == [HERE.drain("uid-0"), HERE.drain("uid-1")]


def test_what_was_written_into_a_former_life_goes_at_once() -> None:
    former = [kv(f"{KEYS.generations}{n}/c10d/digits/kv/a") for n in (1, 2)]
    others = [kv(f"{KEYS.generations}{n}/c10d/digits/kv/a") for n in ("3", "4", "x", "")]
    rest = [KEYS.job, KEYS.last_commit, HERE.commit, HERE.member("gone"), RUN.round]
    rest += [KEYS.history_entry(1, "gone", "join"), HERE.vote(1, "gone"), RUN.node("gone")]
    assert leftovers(KEYS, SNAPSHOT, [*former, *others, *map(kv, rest)]) == former


@pytest.mark.parametrize(("most", "expected"), [(4, KEPT_MIN), (1000, 2000)])
def test_a_cut_of_a_whole_job_costs_nobody_its_place(most: int, expected: int) -> None:
    snapshot = replace(SNAPSHOT, job=Job(1, most, generation=3))
    assert kept(snapshot) == expected
    gone = [kv(KEYS.incarnation(f"w-{n}"), n + 1) for n in range(expected)]
    assert leftovers(KEYS, snapshot, gone) == []


def test_without_a_job_nothing_is_known_to_be_gone() -> None:
    gone = [kv(KEYS.incarnation(f"w-{n}"), n + 1) for n in range(KEPT_MIN + 1)]
    assert leftovers(KEYS, Snapshot(1), gone) == []


@pytest.mark.parametrize(
    "connection", [f"{NONCE}.7", f"{NONCE}.7:3", "0123456789abcdef" * 2, f"{'f' * 32}:12"]
)
@pytest.mark.parametrize("name", ["w-0", "w.0", f"w.{NONCE}", "w.1.2:3"])
def test_records_of_connections_stay_while_their_member_is_here(name: str, connection: str) -> None:
    records = [kv(RUN.operation(f"{name}.{connection}"), n + 1) for n in range(KEPT_MIN + 2)]
    assert len(orphans(HERE, SNAPSHOT, records)) == 2
    with_it = replace(SNAPSHOT, members={name: member(name)})
    assert orphans(HERE, with_it, records) == []


def test_nothing_but_such_records_is_taken_for_one() -> None:
    odd = [RUN.operation("?"), RUN.operation("w-0"), RUN.value(b"ops/w-0"), RUN.node("w-0")]
    odd.append(KEYS.in_generation(2).run("digits").operation(f"w-0.{NONCE}.1"))
    assert orphans(HERE, SNAPSHOT, [kv(key) for key in odd for _ in range(KEPT_MIN + 1)]) == []


A, B = member("a"), member("b", 2)
BOTH = Snapshot(5, Job(1, 4), {"a": A, "b": B})


def test_who_is_gone_without_a_goodbye_is_lost() -> None:
    assert lost_members(BOTH, replace(BOTH, members={"a": A}), frozenset()) == (B,)


def test_who_said_goodbye_is_not() -> None:
    assert lost_members(BOTH, replace(BOTH, members={"a": A}), frozenset({"b"})) == ()


def test_a_new_generation_loses_nobody() -> None:
    assert lost_members(BOTH, Snapshot(6, Job(1, 4, generation=2)), frozenset()) == ()
