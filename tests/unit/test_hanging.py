# SPDX-License-Identifier: Apache-2.0
"""When the torchrun of a pod counts as hung, and which worlds it is to leave."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from launcher_shim.c10d.rounds.hanging import HangDecision, Signs, decide
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy
from launcher_shim.c10d.rounds.observations import RoundObservations, stand
from launcher_shim.c10d.rounds.records import Node, Round
from launcher_shim.c10d.rounds.views import trains_no_more
from tests.support.records import members, node, run, world

NOW = 1000.0
POLICY = RoundPolicy(min_nodes=2, max_nodes=4)
WORLD = world()


@pytest.mark.parametrize(
    ("silent_s", "pending", "told_s", "says", "wake_s"),
    [
        (0.0, False, None, "", 30.0),
        (29.0, False, None, "", 1.0),
        (30.0, False, None, "has sent no request for 30 s", math.inf),
        (90.0, True, None, "", 30.0),
        (1.0, False, 0.0, "", 29.0),
        (1.0, False, 100.0, "", 20.0),
        (1.0, False, 120.0, "its world 120 s ago", math.inf),
        (1.0, True, 120.0, "its world 120 s ago", math.inf),
        (30.0, False, 5.0, "has sent no request for 30 s", math.inf),
    ],
)
def test_when_it_hangs(
    silent_s: float, pending: bool, told_s: float | None, says: str, wake_s: float
) -> None:
    told = None if told_s is None else NOW - told_s
    decision = decide(NOW, Signs(NOW - silent_s, pending, told), POLICY)
    assert says in decision.reason
    assert decision == HangDecision(bool(says), decision.reason, decision.wake_at_s)
    assert decision.wake_at_s - NOW == wake_s or decision.wake_at_s == wake_s == math.inf


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
        (replace(STEPS, save="agreed", asked_s=NOW - 5, leave_shown_s=NOW), True, math.inf),
    ],
)
def test_a_world_saves_before_a_silent_torchrun_is_given_up_whose_ranks_train(
    signs: Signs, hangs: bool, wake_s: float
) -> None:
    decision = decide(NOW, signs, POLICY)
    assert decision.reason.startswith("it has sent no request for 30 s")
    assert (decision.hangs, decision.saves_first) == (hangs, not hangs)
    assert decision.wake_at_s == NOW + wake_s


def test_one_that_sends_a_request_again_asks_for_no_save_any_more() -> None:
    back = replace(STEPS, seen_s=NOW - 1, save="agreed", asked_s=NOW - 5)
    assert decide(NOW, back, POLICY) == HangDecision(wake_at_s=NOW + 29)


def test_torch_has_time_to_stop_workers_that_can_be_stopped() -> None:
    shutdown_grace_s = 30.0
    assert POLICY.leave_s >= 3 * shutdown_grace_s


A, B, C = (node(member, "in") for member in "abc")
LOST = node("c", "left", left="closed")


ALL = members("abc")


def trains_on(
    *nodes: Node, current: Round = WORLD, membership: RoundMembers = ALL, filled_round: int = -1
) -> bool:
    """Whether the world of the first of them still trains."""
    snapshot = run(nodes, current, membership=membership)
    standings = stand(NOW, snapshot, RoundObservations(), POLICY)
    return not trains_no_more(snapshot, standings, nodes[0], filled_round)


@pytest.mark.parametrize(
    ("c", "current", "membership", "leaves"),
    [
        (C, WORLD, ALL, False),
        (LOST, WORLD, ALL, True),
        (node("c", "left", left="done"), WORLD, ALL, False),
        (C, world(closed="failure"), ALL, True),
        (C, world(closed="success"), ALL, False),
        (C, WORLD, members("abc", ends_round=True), True),
        (C, WORLD, members("ab", leaving="c", granted="c"), True),
        (C, WORLD, members("bc", leaving="a", ends_round=True), False),
        (LOST, WORLD, members("bc", leaving="a"), True),
        (LOST, WORLD, members("bc", leaving="a", granted="a"), False),
    ],
    ids=[
        "all well",
        "one is lost",
        "one was done",
        "closed by failure",
        "closed by success",
        "it has saved",
        "another one was let go",
        "it leaves, and has saved",
        "it leaves, and one is lost",
        "it was let go, and one is lost",
    ],
)
def test_which_world_trains_no_more(
    c: Node, current: Round, membership: RoundMembers, leaves: bool
) -> None:
    assert trains_on(A, B, c, current=current, membership=membership) == (not leaves)


def test_a_world_that_is_only_to_let_somebody_in_trains_until_it_does() -> None:
    nodes = (A, B, C, node("d"))
    assert run(nodes, WORLD).newcomers()
    assert trains_on(*nodes, membership=members("abcd"))


def test_a_world_of_nowhere_trains_no_more_though_it_is_whole() -> None:
    assert not trains_on(A, B, C, filled_round=3)
    assert trains_on(A, B, C, filled_round=2)
    assert trains_on(replace(A, round=2), B, C, filled_round=3)
