# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is to write what all sidecars see due."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from launcher_shim.c10d.rounds.decision_loop import TURN_S, order
from launcher_shim.c10d.rounds.inputs import RoundMembers, RunSnapshot
from launcher_shim.c10d.rounds.records import Node, Round, Seat
from rdzv.reconcile import SPREAD, Turn


def delay_s(member: str, members: list[str], random: Random) -> float:
    return Turn(member, members, TURN_S).delay_s(random.random())


def asking(member: str, revision: int) -> Node:
    return Node(member, "asking", f"n-{member}", 1, member, 1, 0, mod_revision=revision)


def seats(members: str) -> tuple[Seat, ...]:
    return tuple(Seat(member, f"n-{member}", 1) for member in members)


def word(members: str, newest: str, frozen: str = "") -> RunSnapshot:
    nodes = {member: asking(member, 9 if member == newest else 1) for member in members}
    return RunSnapshot(9, Round(1, frozen=seats(frozen)), nodes)


def test_whose_write_made_it_due_is_first_then_the_ranks_then_the_others() -> None:
    wanted = Round(1, complete=True, frozen=seats("cba"))
    assert order(wanted, word("abcdx", newest="b")) == ["b", "c", "a", "d", "x"]


def test_a_round_that_is_over_is_followed_by_its_own_nodes_first() -> None:
    assert order(Round(2), word("abcd", newest="d", frozen="cb")) == ["d", "c", "b", "a"]


def test_who_has_no_node_in_the_store_has_no_turn() -> None:
    wanted = Round(1, complete=True, frozen=seats("cba"))
    assert order(wanted, word("ab", newest="a")) == ["a", "b"]
    assert order(Round(1), word("", newest="")) == []


def test_the_first_writes_at_once_and_twice_as_many_at_each_turn() -> None:
    members = [f"w-{number}" for number in range(1000)]
    delays = [delay_s(member, members, Random(member)) for member in members]
    assert delays[0] == 0
    for turn in range(1, 11):
        within = sum(delay < turn * TURN_S for delay in delays)
        assert within <= 2 ** (turn - 1)
    assert max(delays) <= 10 * TURN_S * (1 + SPREAD)


@pytest.mark.parametrize(("late_s", "writers"), [(0.9 * TURN_S, 1), (0.6, 2)])
def test_how_late_the_watch_is_decides_how_many_write_whatever_their_number(
    late_s: float, writers: int
) -> None:
    for size in (3, 60, 1000):
        members = [f"w-{number}" for number in range(size)]
        writing = [m for m in members if delay_s(m, members, Random(m)) < late_s]
        assert writing == members[:writers]


def test_who_is_not_among_them_comes_last() -> None:
    members = ["a", "b", "c"]
    last = delay_s("spare", members, Random(1))
    assert last >= max(delay_s(member, members, Random(1)) for member in members) > 0


def test_a_member_that_others_have_evicted_costs_no_turn() -> None:
    """Its record is the newest, and it is not there to decide."""
    stored = word("abc", newest="a", frozen="abc")
    evicted = replace(stored, membership=RoundMembers(frozenset("bc")))
    assert order(Round(2), evicted) == ["b", "c", "a"]
