# SPDX-License-Identifier: Apache-2.0
"""For how long a look of torch's agent is held, so that it sees a change at once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy
from launcher_shim.c10d.rounds.records import Node, Round
from launcher_shim.c10d.rounds.views import HELD_BEFORE_S, HELD_MAX_S, View, held_for, view
from launcher_shim.c10d.rounds.world import Reform
from tests.support.records import members, node, run, world

POLICY = RoundPolicy(min_nodes=2, max_nodes=4)
LISTED = members("abcd")
A, B, C = (node(member, "in") for member in "abc")
D = node("d")
NOW = 100.0


def held(
    me: Node = A,
    *others: Node,
    current: Round | None = None,
    membership: RoundMembers = LISTED,
    reform: Reform | None = None,
    after_s: float = 0.0,
    parked: bool = False,
    **due: Any,
) -> float:
    """For how many seconds more ``me``'s look is held, ``after_s`` after it came."""
    snapshot = run((me, *others), current or world(), membership=membership)
    shown = view(snapshot, POLICY, me, parked=parked, parks=True)
    found, why = held_for(
        *(NOW + after_s, NOW, snapshot, reform or Reform(), POLICY, me, shown), **due
    )
    assert why
    return round(found, 3)


def test_nothing_is_held_while_nothing_is_in_progress() -> None:
    assert held(A, B, C) == 0


UNDER_WAY = {
    "a drain": replace(LISTED, leaving=frozenset("c")),
    "held ranks": replace(LISTED, join_agreed=True),
    "a save that is done": replace(LISTED, ends_round=True),
}


@pytest.mark.parametrize("what", UNDER_WAY)
def test_a_look_is_held_beside_a_change_and_not_for_longer_than_its_limit(what: str) -> None:
    assert held(A, B, C, membership=UNDER_WAY[what]) == HELD_MAX_S
    assert held(A, B, C, membership=UNDER_WAY[what], after_s=0.5) == round(HELD_MAX_S - 0.5, 3)
    assert held(A, B, C, membership=UNDER_WAY[what], after_s=HELD_MAX_S) == 0


def test_a_pod_that_leaves_gets_its_answer_as_it_may_get_a_signal() -> None:
    leaving = replace(LISTED, leaving=frozenset("a"))
    assert held(A, B, C, membership=leaving) == 0
    assert held(B, A, C, membership=leaving) == HELD_MAX_S


def test_a_drain_of_a_node_in_no_world_holds_no_answer() -> None:
    assert held(A, B, C, D, membership=replace(LISTED, leaving=frozenset("d"))) == 0


def test_the_last_look_before_newcomers_are_let_in_is_held() -> None:
    """Those before it are answered: the next ones, a second later, come in time."""
    soon, later = (Reform("", "a wave", NOW + in_s) for in_s in (0.5, 1.5))
    for one, others in ((A, (B, C, D)), (D, (A, B, C))):
        assert held(one, *others, reform=soon) == HELD_MAX_S
        assert held(one, *others, reform=later) == 0
        assert held(one, *others, reform=Reform("join", "due")) == HELD_MAX_S
    assert HELD_BEFORE_S < HELD_MAX_S


def test_the_last_look_before_a_silent_node_is_evicted_is_held() -> None:
    assert held(A, B, C, evicts_s=NOW + HELD_BEFORE_S) == HELD_MAX_S
    assert held(A, B, C, evicts_s=NOW + 1.0) == 0
    assert held(A, B, C, evicts_s=NOW - 0.5) == HELD_MAX_S  # the second suspicion may come late
    assert held(A, B, C, evicts_s=NOW - HELD_MAX_S) == 0  # nothing came of it
    # It was, and the end of the world is not in the store yet.
    assert held(A, B, C, ends=True) == HELD_MAX_S


def test_who_sees_that_it_has_to_do_something_waits_for_nothing() -> None:
    ends = replace(world(), ends="lost c")
    assert held(A, B, current=ends) == 0  # it is shown a waiter
    assert held(D, A, B, current=replace(world(), closed="success")) == 0
    asks = [node(member) for member in "ab"]
    assert held(*asks, current=Round(4), parked=True) == 0  # it is to take itself off a list


def test_who_asks_is_held_while_a_round_forms() -> None:
    asks = [node(member) for member in "abd"]
    assert held(*asks, current=Round(4)) == HELD_MAX_S
    assert held(D, A, B, current=replace(world(), ends="lost c")) == HELD_MAX_S
    # Below the minimum it may take days.
    assert held(asks[0], current=Round(4)) == 0


def test_a_view_that_is_in_no_list_is_not_held() -> None:
    snapshot = run((A,), Round(4), membership=LISTED)
    shown = View("apart", Round(4))
    assert held_for(NOW, NOW, snapshot, Reform("", "", math.inf), POLICY, A, shown)[0] == 0
