# SPDX-License-Identifier: Apache-2.0
"""When the torchrun of a pod counts as hung, and which worlds it is to leave."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from launcher_shim.c10d.rounds.hanging import HangDecision, Signs, decide
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.observations import RoundObservations, stand
from launcher_shim.c10d.rounds.records import LeftReason, Node, Round, Seat
from launcher_shim.c10d.rounds.views import trains_no_more

NOW = 1000.0
POLICY = RoundPolicy(min_nodes=2, max_nodes=4)
WORLD = Round(3, True, frozen=tuple(Seat(member, "n", 1) for member in "abc"), mod_revision=9)


@pytest.mark.parametrize(
    ("silent_s", "pending", "told_s", "says", "wake_s"),
    [
        (0.0, False, None, "", 30.0),
        (29.0, False, None, "", 1.0),
        (30.0, False, None, "has asked for nothing for 30 s", math.inf),
        (90.0, True, None, "", 30.0),
        (1.0, False, 0.0, "", 29.0),
        (1.0, False, 100.0, "", 20.0),
        (1.0, False, 120.0, "told 120 s ago", math.inf),
        (1.0, True, 120.0, "told 120 s ago", math.inf),
        (30.0, False, 5.0, "has asked for nothing for 30 s", math.inf),
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


def test_torch_has_time_to_stop_workers_that_can_be_stopped() -> None:
    shutdown_grace_s = 30.0
    assert POLICY.leave_s >= 3 * shutdown_grace_s


def inside(member: str) -> Node:
    return Node(member, "in", "n", 1, "10.0.0.1", 42, 0, 3)


def node(member: str, left: LeftReason) -> Node:
    return replace(inside(member), state="left", round=0, left_reason=left)


A, B, C = map(inside, "abc")


@pytest.mark.parametrize(
    ("c", "current", "membership", "leaves"),
    [
        (C, WORLD, RoundMembers(frozenset("abc")), False),
        (node("c", "closed"), WORLD, RoundMembers(frozenset("abc")), True),
        (node("c", "done"), WORLD, RoundMembers(frozenset("abc")), False),
        (C, replace(WORLD, closed="failure"), RoundMembers(frozenset("abc")), True),
        (C, replace(WORLD, closed="success"), RoundMembers(frozenset("abc")), False),
        (C, WORLD, RoundMembers(frozenset("abc"), ends_round=True), True),
        (C, WORLD, RoundMembers(frozenset("ab"), frozenset("c"), frozenset("c")), True),
        (C, WORLD, RoundMembers(frozenset("bc"), frozenset("a"), ends_round=True), False),
        (node("c", "closed"), WORLD, RoundMembers(frozenset("bc"), frozenset("a")), True),
        (
            node("c", "closed"),
            WORLD,
            RoundMembers(frozenset("bc"), frozenset("a"), frozenset("a")),
            False,
        ),
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
    snapshot = RunSnapshot(50, current, {n.member: n for n in (A, B, c)}, membership)
    standings = stand(NOW, snapshot, RoundObservations(), POLICY)
    assert trains_no_more(snapshot, standings, A, -1) == leaves


def test_a_world_that_is_only_to_let_somebody_in_trains_until_it_does() -> None:
    newcomer = Node("d", "asking", "n", 1, "10.0.0.1", 42, 0)
    nodes = {n.member: n for n in (A, B, C, newcomer)}
    snapshot = RunSnapshot(50, WORLD, nodes, RoundMembers(frozenset("abcd")))
    standings = stand(NOW, snapshot, RoundObservations(), POLICY)
    assert snapshot.newcomers(POLICY.max_nodes)
    assert not trains_no_more(snapshot, standings, A, -1)


def test_a_world_of_nowhere_trains_no_more_though_it_is_whole() -> None:
    nodes = {n.member: n for n in (A, B, C)}
    snapshot = RunSnapshot(50, WORLD, nodes, RoundMembers(frozenset("abc")))
    standings = stand(NOW, snapshot, RoundObservations(), POLICY)
    assert trains_no_more(snapshot, standings, A, 3)
    assert not trains_no_more(snapshot, standings, A, 2)
    assert not trains_no_more(snapshot, standings, replace(A, round=2), 3)
