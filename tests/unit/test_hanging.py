# SPDX-License-Identifier: Apache-2.0
"""When a torchrun is to leave its world, and how long a look of torch's agent is held."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from launcher_shim.c10d.rounds import decision
from launcher_shim.c10d.rounds.decision_loop import HangDecision, HangWatch, Signs, decide_on_hang
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy
from launcher_shim.c10d.rounds.observations import (
    RanksSeen,
    RoundObservations,
    Standings,
    observe,
    stand,
)
from launcher_shim.c10d.rounds.records import Node, NodeState, Round
from launcher_shim.c10d.rounds.views import (
    HELD_BEFORE_S,
    HELD_MAX_S,
    View,
    held_for,
    view,
)
from launcher_shim.c10d.rounds.world import Reform
from tests.support.records import members, node, run, world

NOW = 1000.0
POLICY = RoundPolicy(min_nodes=2, max_nodes=4)
WORLD = world()
A, B, C = (node(member, "in") for member in "abc")
ENDING = world(ends="it has lost d")


@pytest.mark.parametrize(
    ("silent_s", "pending", "stays", "says", "wake_s"),
    [
        (0.0, False, False, "", 30.0),
        (29.0, False, False, "", 1.0),
        (30.0, False, False, "has sent no request for 30 s", math.inf),
        (90.0, True, False, "", 30.0),
        (1.0, False, True, "has not left its lost world for 120 s", math.inf),
        (1.0, True, True, "has not left its lost world for 120 s", math.inf),
        (30.0, False, True, "has sent no request for 30 s", math.inf),
    ],
)
def test_when_it_hangs(
    silent_s: float, pending: bool, stays: bool, says: str, wake_s: float
) -> None:
    found = decide_on_hang(NOW, Signs(NOW - silent_s, pending, stays), POLICY)
    assert says in found.reason
    assert found == HangDecision(bool(says), found.reason, found.wake_at_s)
    assert found.wake_at_s - NOW == wake_s or found.wake_at_s == wake_s == math.inf


STEPS = Signs(NOW - 30, stepped_s=NOW - 20)


@pytest.mark.parametrize(
    ("signs", "hangs", "wake_s"),
    [
        (STEPS, False, 15.0),
        # Its last boundary may have been before it fell silent: the whole pod stands still.
        (replace(STEPS, stepped_s=NOW - 21), True, math.inf),
        (replace(STEPS, save="asked", asked_s=NOW - 14), False, 1.0),
        (replace(STEPS, save="asked", asked_s=NOW - 15), True, math.inf),
        (replace(STEPS, save="agreed", asked_s=NOW - 300), False, math.inf),
        (replace(STEPS, save="over", asked_s=NOW - 5), True, math.inf),
    ],
)
def test_a_world_saves_before_a_silent_torchrun_is_given_up_whose_ranks_train(
    signs: Signs, hangs: bool, wake_s: float
) -> None:
    decision = decide_on_hang(NOW, signs, POLICY)
    assert decision.reason.startswith("it has sent no request for 30 s")
    assert (decision.hangs, decision.saves_first) == (hangs, not hangs)
    assert decision.wake_at_s == NOW + wake_s


def test_one_that_sends_a_request_again_asks_for_no_save_any_more() -> None:
    back = replace(STEPS, seen_s=NOW - 1, save="agreed", asked_s=NOW - 5)
    assert decide_on_hang(NOW, back, POLICY) == HangDecision(wake_at_s=NOW + 29)


@pytest.mark.parametrize("ends", [False, True])
def test_a_silent_torchrun_of_a_world_that_ends_is_given_up_without_a_save(*, ends: bool) -> None:
    current, calls = ENDING if ends else WORLD, list[object]()
    place: Any = SimpleNamespace(
        holder=SimpleNamespace(seen_s=NOW - 30, pending=0),
        own_node=lambda claim: A,
        call_silent=lambda claim, *, silent: calls.append(silent),
        leave=lambda claim, reason: calls.append(reason),
    )
    seen = run((A, B, C), current)
    evaluation: Any = SimpleNamespace(standings=Standings({}), snapshot=seen, stored=seen)
    ranks = RanksSeen(current.number, stepped_s=NOW - 20)
    evaluator: Any = SimpleNamespace(policy=lambda: POLICY, ranks=ranks)
    HangWatch(place, evaluator).leave_if_hung(evaluation, NOW)
    assert calls == ([False, "hung"] if ends else [True])


def test_torch_has_time_to_stop_workers_that_can_be_stopped() -> None:
    shutdown_grace_s = 30.0
    assert POLICY.leave_s >= 3 * shutdown_grace_s


@pytest.mark.parametrize("state", ["in", "asking"])
def test_i11_whoever_does_not_leave_a_world_that_ends_holds_nobody_up(state: NodeState) -> None:
    """Also if its own sidecar writes nothing: the others have left, and ask."""
    lost = run((node("a", ask=2), replace(B, state=state), node("d")), world("ab"))
    ends = decision.decide(NOW, lost, RoundObservations(), POLICY).round
    assert ends == replace(lost.round, ends="it has lost a")
    snapshot = replace(lost, round=ends)
    seen = observe(NOW, RoundObservations(), snapshot, POLICY, healthy_s=99, cut_off=False)
    almost = decision.decide(NOW + POLICY.leave_s - 0.1, snapshot, seen, POLICY)
    assert (almost.round, almost.wake_at_s) == (None, NOW + POLICY.leave_s)
    after = decision.decide(NOW + POLICY.leave_s, snapshot, seen, POLICY)
    assert after.round == decision.next_round(ends)


def test_a_sidecar_whose_watch_was_cut_counts_from_its_return() -> None:
    snapshot = run((node("a", ask=2), B), world("ab", ends="it has lost a"))
    seen = observe(NOW, RoundObservations(), snapshot, POLICY, healthy_s=99, cut_off=False)
    seen = observe(NOW + 100, seen, snapshot, POLICY, healthy_s=1, cut_off=False)
    assert stand(NOW + 200, snapshot, seen, POLICY).of[B.seat] == "here"
    assert stand(NOW + 99 + POLICY.leave_s, snapshot, seen, POLICY).of[B.seat] == "hung"


LISTED = members("abcd")
D = node("d")
LOOK_NOW = 100.0


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
        *(LOOK_NOW + after_s, LOOK_NOW, snapshot, reform or Reform(), POLICY, me, shown), **due
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
    soon, later = (Reform("", "a wave", LOOK_NOW + in_s) for in_s in (0.5, 1.5))
    for one, others in ((A, (B, C, D)), (D, (A, B, C))):
        assert held(one, *others, reform=soon) == HELD_MAX_S
        assert held(one, *others, reform=later) == 0
        assert held(one, *others, reform=Reform("join", "due")) == HELD_MAX_S
    assert HELD_BEFORE_S < HELD_MAX_S


def test_the_last_look_before_a_silent_node_is_evicted_is_held() -> None:
    assert held(A, B, C, evicts_s=LOOK_NOW + HELD_BEFORE_S) == HELD_MAX_S
    assert held(A, B, C, evicts_s=LOOK_NOW + 1.0) == 0
    assert (
        held(A, B, C, evicts_s=LOOK_NOW - 0.5) == HELD_MAX_S
    )  # the second suspicion may come late
    assert held(A, B, C, evicts_s=LOOK_NOW - HELD_MAX_S) == 0  # nothing came of it
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
    assert (
        held_for(LOOK_NOW, LOOK_NOW, snapshot, Reform("", "", math.inf), POLICY, A, shown)[0] == 0
    )
