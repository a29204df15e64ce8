# SPDX-License-Identifier: Apache-2.0
"""What each agent is shown, and what torch finds in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher_shim.c10d.rounds.decision import decide, why_it_ends
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.observations import RoundObservations, observe, stand
from launcher_shim.c10d.rounds.records import ClosedWhy, Node, Round
from launcher_shim.c10d.rounds.views import (
    FAR_FUTURE,
    WAITER,
    View,
    hand,
    portray,
    view,
)
from launcher_shim.c10d.rounds.world import Reform, reform
from launcher_shim.c10d.state_codec import Flavour, NodeDesc, decode, encode
from tests.support.records import members, node, run, world

POLICY = RoundPolicy(min_nodes=2, max_nodes=4)
ME = NodeDesc("10.0.0.1", 42, 0)
WORLD, OPEN = world(), Round(3)
NOTHING = RoundObservations()


def seen(snapshot: RunSnapshot) -> RoundObservations:
    """What is known once whoever is missing has been so for long."""
    return observe(1e3, RoundObservations(), snapshot, POLICY, healthy_s=1e3, cut_off=False)


def written(snapshot: RunSnapshot) -> RunSnapshot:
    """The same, once it is written that its world must form again, if it must."""
    reforms = reform(2e3, snapshot, RoundObservations(), POLICY)
    decided = decide(2e3, snapshot, seen(snapshot), POLICY, reforms).round
    return replace(snapshot, round=decided) if decided is not None and decided.ends else snapshot


def shown(
    me: Node,
    *others: Node,
    current: Round = WORLD,
    parked: bool = False,
    parks: bool = True,
    membership: RoundMembers | None = None,
    waited_s: float = 0.0,
) -> View:
    """The view of ``me``, once all that is due is written."""
    snapshot = run((me, *others), current, listed="abcdef", membership=membership)
    how: Any = {"parked": parked, "parks": parks, "waited_s": waited_s}
    before = view(snapshot, POLICY, me, **how)
    assert not before.phantom or before.role != "participant" or current.is_ending
    return view(written(snapshot), POLICY, me, **how)


A, B, C = (node(member, "in") for member in "abc")
D = node("d")
DONE_A, DONE_B = replace(A, finished=True), replace(B, finished=True)


def test_the_world_is_shown_whole_until_one_leaves_it_itself() -> None:
    assert shown(A, B, C) == View("participant", WORLD)
    gone = View("participant", replace(WORLD, ends="it has lost c"), phantom=True)
    assert shown(A, B, node("c", "left")) == gone
    assert shown(A, B) == gone


@pytest.mark.parametrize(
    ("others", "current", "membership", "again"),
    [
        ((B, C), WORLD, members("abc"), False),
        ((B, C, D), WORLD, members("abcd"), True),
        ((B, C, D), WORLD, members("abc", leaving="d"), False),
        ((B, C, D), WORLD, members("abcd", joins_wait=True), False),
        ((B, C, D), world(finishing=True), members("abcd"), False),
        ((B, node("c", "left")), world(finishing=True), members(), True),
        ((B, C), WORLD, members("ab", leaving="c"), False),
        ((B, C), WORLD, members("ab", leaving="c", granted="c"), True),
        (
            (B, C),
            world(finishing=True),
            members("ab", leaving="c", granted="c", ends_round=True),
            False,
        ),
        ((B, C), WORLD, members("abc", ends_round=True), True),
        ((B, C, D), WORLD, members("abcd", joins_wait=True, ends_round=True), True),
        ((B, node("c", "left")), WORLD, members("abc", joins_wait=True), True),
        ((B, node("c", "left")), WORLD, members("ab", leaving="c", saved="c"), False),
        (
            (node("b", "left"), node("c", "left")),
            WORLD,
            members("ab", leaving="c", saved="c"),
            True,
        ),
    ],
    ids=[
        "all well",
        "one asks",
        "a spare asks",
        "a commit is under way",
        "finishing",
        "finishing, one left",
        "one drains",
        "one was granted its leave",
        "finishing, one was granted its leave",
        "admitted, and gone again",
        "another one asks after the leave of one that is gone was granted",
        "one is lost during a commit",
        "a leaver that has saved is gone while others save",
        "and one that stays is lost as well",
    ],
)
def test_when_the_world_is_to_form_again(
    others: tuple[Node, ...], current: Round, membership: RoundMembers, again: bool
) -> None:
    assert shown(A, *others, current=current, membership=membership).phantom == again


def test_a_full_world_lets_nobody_in() -> None:
    full = world("abcd")
    e = node("e")
    assert not shown(A, B, C, node("d", "in"), e, current=full).phantom
    assert shown(e, A, B, C, node("d", "in"), current=full).role == "parked"


@pytest.mark.parametrize(
    ("granted", "saved", "finishing", "leaves"),
    [("", "", False, True), ("a", "", False, False), ("", "c", False, False), ("", "", True, True)],
    ids=["not let go", "let go", "the lost one has saved", "finishing"],
)
def test_i1_who_leaves_the_job_leaves_a_lost_world_first(
    granted: str, saved: str, finishing: bool, leaves: bool
) -> None:
    membership = members("bc", leaving="ac", granted=granted, saved=saved)
    current = world(finishing=finishing)
    assert shown(A, B, node("c", "left"), current=current, membership=membership).phantom == leaves


def test_a_leaver_is_shown_no_waiter() -> None:
    leaving = members("bc", leaving="a", granted="a")
    assert not shown(A, B, C, membership=leaving).phantom
    assert shown(B, A, C, membership=leaving).phantom
    stale = shown(node("a", "in", number=2), B, C, membership=leaving)
    assert (stale.role, stale.phantom) == ("apart", False)


@pytest.mark.parametrize(
    ("me", "current"),
    [
        (node("a", "in", number=2), WORLD),
        (node("a", "in", number=2), OPEN),
        (node("a", "left", left="hung"), WORLD),
        # A number was given out once more, as the store was restored to before its world.
        (node("d", "in"), WORLD),
        (node("a", "in", ask=2), WORLD),
    ],
    ids=[
        "a later round is complete",
        "a later round is open",
        "given up for hung",
        "i1 of another world of that number",
        "i1 by a later ask",
    ],
)
def test_one_whose_world_is_not_the_live_one_comes_back(me: Node, current: Round) -> None:
    others = (one for one in (A, B, C) if one.member != me.member)
    assert shown(me, *others, current=current) == View("apart", Round(3), phantom=True)


@pytest.mark.parametrize(
    ("me", "current", "parked", "parks", "expected"),
    [
        (node("d"), OPEN, False, True, "asking"),
        (node("d"), OPEN, True, True, "promoted"),
        (node("d"), WORLD, False, True, "parked"),
        (node("d"), WORLD, True, True, "parked"),
        (node("d"), WORLD, False, False, "waiting"),
        (node("a"), WORLD, False, True, "asking"),
        (node("a", ask=2), WORLD, False, True, "parked"),
    ],
    ids=[
        "open",
        "open after parking",
        "complete",
        "parked already",
        "cannot park",
        "frozen, not handed yet",
        "frozen with an earlier ask",
    ],
)
def test_one_that_asks(me: Node, current: Round, parked: bool, parks: bool, expected: str) -> None:
    found = shown(me, B, C, current=current, parked=parked, parks=parks)
    assert (found.role, found.phantom) == (expected, False)


@pytest.mark.parametrize(
    "membership",
    [members("bc", leaving="a"), members("bc", leaving="a", granted="a"), members("bc")],
    ids=["leaving", "granted", "not listed"],
)
def test_one_whose_drain_begins_before_it_is_handed_its_world_is_handed_it_still(
    membership: RoundMembers,
) -> None:
    assert shown(node("a"), B, C, membership=membership).role == "asking"


@pytest.mark.parametrize(
    "membership", [members("ab"), members("abd", leaving="d")], ids=["not listed", "leaving"]
)
def test_one_that_may_not_join_is_parked_in_an_open_round(membership: RoundMembers) -> None:
    assert shown(D, current=OPEN, membership=membership).role == "parked"
    away = shown(node("d", "left"), current=OPEN, membership=membership)
    assert (away.role, away.full) == ("apart", True)


@pytest.mark.parametrize(("current", "full"), [(OPEN, False), (WORLD, True)])
def test_one_that_left_is_in_no_list(current: Round, full: bool) -> None:
    assert shown(node("a", "left"), B, C, current=current) == View("apart", Round(3), full=full)


def test_closed() -> None:
    closed = world(closed="success")
    assert shown(A, B, C, current=closed) == View("participant", closed, closed=True)
    assert shown(D, A, B, C, current=closed) == View("apart", Round(3), closed=True)


@pytest.mark.parametrize("leaving", ["", "a"])
def test_all_leave_a_run_that_is_closed_by_failure_and_none_is_told_that_it_is(
    leaving: str,
) -> None:
    failed = world(closed="failure")
    membership = members("abcd".replace(leaving, ""), leaving=leaving)
    assert shown(A, B, C, current=failed, membership=membership).phantom
    asks = node("a", ask=2)
    for me, role in ((D, "parked"), (asks, "parked"), (node("b", "left"), "apart")):
        view = shown(me, C, current=failed, membership=membership)
        assert (view.role, view.full, view.closed, view.phantom) == (role, True, False, False)


@pytest.mark.parametrize("closed", ["", "failure"])
def test_who_stands_in_the_exit_barrier_is_left_in_peace_whatever_fails(closed: ClosedWhy) -> None:
    finishing = world(finishing=True, closed=closed)
    lost = node("c", "left")
    assert not shown(DONE_A, B, lost, current=finishing).phantom
    assert shown(B, DONE_A, lost, current=finishing).phantom


@pytest.mark.parametrize(
    ("nodes", "current", "expected"),
    [
        ((node("a"), B, C), WORLD, node("a", "in")),
        ((A, B, C), WORLD, None),
        ((D, A, B, C), WORLD, None),
        ((node("a", ask=2), B, C), WORLD, None),
        ((node("a"), B, node("c", "left")), WORLD, node("a", ask=2)),
        ((node("a"), B, node("c", ask=2)), WORLD, node("a", ask=2)),
        ((node("a"), B, C), world(restored=True), node("a", ask=2)),
        ((A, B, C), world(restored=True), None),
        ((node("a"),), world(closed="failure"), node("a", ask=2)),
    ],
    ids=[
        "it asked",
        "handed already",
        "not frozen",
        "it asked anew",
        "one has left",
        "one asks anew",
        "i11 a world that the store had lost",
        "i11 handed before the store had lost it",
        "closed by failure",
    ],
)
def test_i11_a_round_is_handed_once_or_one_withdraws_from_it(
    nodes: tuple[Node, ...], current: Round, expected: Node | None
) -> None:
    snapshot = run(nodes, current)
    assert hand(written(snapshot), nodes[0]) == expected


@pytest.mark.parametrize(
    ("nodes", "current", "again"),
    [
        ((D,), OPEN, False),
        ((A, B, node("c")), WORLD, False),
        ((A, B, C, D), WORLD, True),
        ((A, B, node("c", ask=2)), WORLD, True),
        ((A, B, D), WORLD, False),
    ],
    ids=[
        "not complete yet",
        "one is frozen and not handed the round yet",
        "one asks beside a world with room",
        "one of them asks anew",
        "it is not known yet whether the missing one is gone",
    ],
)
def test_when_a_round_must_form_again(nodes: tuple[Node, ...], current: Round, again: bool) -> None:
    snapshot = run(nodes, current)
    reforms = reform(0, snapshot, RoundObservations(), POLICY)
    assert bool(why_it_ends(snapshot, stand(0, snapshot, NOTHING, POLICY), reforms)) == again


@pytest.mark.parametrize(
    ("nodes", "again"),
    [
        ((DONE_A, DONE_B, D), False),
        ((DONE_A, B, D), True),
        ((DONE_A, DONE_B, node("c", "left"), D), True),
        ((DONE_A, node("b", ask=2), D), True),
    ],
    ids=[
        "one asks for the work of a pod whose sidecar is away",
        "with one that works on",
        "its torchrun has left",
        "with one that asks anew",
    ],
)
def test_i11_a_loss_ends_a_world_that_finishes_only_if_another_can_follow(
    nodes: tuple[Node, ...], again: bool
) -> None:
    snapshot = run(nodes, replace(WORLD, finishing=True))
    lost = stand(1e6, snapshot, seen(snapshot), POLICY)
    assert bool(why_it_ends(snapshot, lost, Reform())) == again


# --- as torch reads it ---


def test_ranks_are_the_frozen_order_and_only_our_own_name_is_real() -> None:
    state = portray(View("participant", WORLD, phantom=True), ME, "b", 4)
    assert state.participants[ME] == 1
    assert sorted(state.participants.values()) == [0, 1, 2]
    assert state.complete
    assert state.wait_list == {WAITER}
    assert not state.redundancy_list


@pytest.mark.parametrize(
    ("role", "full", "complete", "participants", "redundant", "waits"),
    [
        ("apart", False, False, 0, False, False),
        ("apart", True, True, 4, False, False),
        ("asking", False, False, 1, False, False),
        ("parked", True, True, 4, True, False),
        ("promoted", False, True, 0, True, False),
        ("waiting", True, True, 4, False, True),
    ],
)
def test_the_lists_of_each_role(
    role: str, full: bool, complete: bool, participants: int, redundant: bool, waits: bool
) -> None:
    made = View(role, OPEN, full=full)  # type: ignore[arg-type]
    state = portray(made, ME, "a", 4)
    assert state.complete == complete
    assert len(state.participants) == participants
    assert (ME in state.participants) == (role == "asking")
    assert (ME in state.redundancy_list) == redundant
    assert (ME in state.wait_list) == waits
    assert state.last_heartbeats == {ME: FAR_FUTURE}


@pytest.mark.parametrize("flavour", [Flavour(True), Flavour(False), Flavour(False, False)])
def test_every_view_survives_the_codec(flavour: Flavour) -> None:
    made = View("parked" if flavour.redundancy else "waiting", OPEN, full=True, phantom=False)
    state = portray(made, ME, "a", 4)
    assert decode(encode(state, flavour))[0] == state


@pytest.mark.parametrize("parked", [False, True])
def test_one_that_asks_in_a_round_that_does_not_form_is_parked_until_it_is_frozen(
    parked: bool,
) -> None:
    asks, waited_s = node("a"), POLICY.park_s
    assert shown(asks, current=OPEN, parked=parked, waited_s=waited_s).role == "parked"
    assert shown(asks, B, C, parked=parked, waited_s=1e6).role == (
        "promoted" if parked else "asking"
    )
    assert shown(asks, current=OPEN, waited_s=waited_s - 0.1).role == "asking"
    # Without a redundancy list there is nowhere to park it.
    assert shown(asks, current=OPEN, parks=False, waited_s=1e6).role == "asking"
