# SPDX-License-Identifier: Apache-2.0
"""When a round is complete, when it is over, and who is gone: one table a rule."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.c10d.rounds.decision import RoundDecision, decide, next_round
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.observations import RoundObservations, Standings, observe, stand
from launcher_shim.c10d.rounds.records import ClosedWhy, Node, Round, Seat, first_round
from launcher_shim.c10d.rounds.views import somebody_goes_on
from rdzv.mirror import HEALTHY_S
from rdzv.store import WATCH_PROGRESS_S
from tests.support.records import members, node, run, world

NOW = 500.0
POLICY = RoundPolicy(min_nodes=2, max_nodes=4)
WATCHED = RoundObservations(healthy_since_s=NOW - 100)


def inside(names: str) -> list[Node]:
    return [node(name, "in") for name in names]


# --- complete ---


@pytest.mark.parametrize(
    ("asking", "listed", "completes", "reason"),
    [
        ("", "abcd", False, "0 nodes ask, 2 are needed"),
        ("a", "abcd", False, "1 node asks, 2 are needed"),
        ("ab", "ab", True, "no other node is expected"),
        ("ab", "abc", False, "waiting for c"),
        ("abc", "ab", True, "no other node is expected"),
        ("abcd", "abcdef", True, "the maximum"),
        ("abcdef", "abcdef", True, "the maximum"),
    ],
)
def test_complete(asking: str, listed: str, completes: bool, reason: str) -> None:
    decision = decide(NOW, run(map(node, asking), listed=listed), WATCHED, POLICY)
    assert (decision.round is not None) == completes
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("asking", "frozen"),
    [
        ([node(m, revision=r) for r, m in enumerate("edcba", 1)], "bcde"),
        ([node(m, addr="same") for m in "ba"], "ab"),
    ],
    ids=["the first to ask", "equal descriptions"],
)
def test_nodes_are_frozen_in_the_order_of_ranks(asking: list[Node], frozen: str) -> None:
    listed = "".join(one.member for one in asking)
    decision = decide(NOW, run(asking, listed=listed), WATCHED, POLICY)
    assert decision.round is not None
    assert [seat.member for seat in decision.round.frozen] == [*frozen]


@pytest.mark.parametrize("asking", ["ab", "abcd"])
@pytest.mark.parametrize("current", [first_round(2), Round(1), Round(first_round(2).number + 1)])
def test_i1_who_has_just_come_waits_for_a_world_that_the_store_may_have_lost(
    asking: str, current: Round
) -> None:
    seen = replace(WATCHED, life_since_s=NOW)
    opened = run(map(node, asking), current, listed=asking)
    waits = decide(NOW, opened, seen, POLICY)
    assert (waits.round, waits.wake_at_s) == (None, NOW + POLICY.life_s)
    assert decide(waits.wake_at_s, opened, seen, POLICY).round is not None
    # Who has been there for longer does not, nor does the first world of a job.
    assert decide(NOW, opened, WATCHED, POLICY).round is not None
    first = run(map(node, asking), Round(), listed=asking)
    assert decide(NOW, first, seen, POLICY).round is not None


def test_since_when_a_member_is_in_a_life_of_the_job_does_not_change() -> None:
    seen = RoundObservations(life_since_s=NOW)
    for now in (NOW + 1, NOW + 2):
        seen = observe(now, seen, run(), POLICY, healthy_s=1, cut_off=True)
    assert seen.life_since_s == NOW


@pytest.mark.parametrize("membership", [members("ab"), members("abc", leaving="c")])
def test_who_may_not_join_is_not_frozen(membership: RoundMembers) -> None:
    decision = decide(NOW, run(map(node, "abc"), membership=membership), WATCHED, POLICY)
    assert decision.round is not None
    assert [seat.member for seat in decision.round.frozen] == ["a", "b"]


@pytest.mark.parametrize(
    ("other", "waits_s"),
    [
        (None, POLICY.first_call_s),
        (node("c", "left"), POLICY.last_call_s),
        (node("c", "in", number=1), POLICY.last_call_s),
    ],
)
def test_who_is_listed_is_waited_for_but_not_for_ever(other: Node | None, waits_s: float) -> None:
    snapshot = run([*map(node, "ab"), *([other] if other else [])], listed="abc")
    seen = replace(WATCHED, round_number=0, met_min_s=NOW)
    early = decide(NOW, snapshot, seen, POLICY)
    assert early.round is None
    assert early.wake_at_s == NOW + waits_s
    late = decide(NOW + waits_s, snapshot, seen, POLICY)
    assert late.round is not None
    assert "the last call is over" in late.reason


def test_who_left_is_waited_for_from_when_it_left() -> None:
    gone = node("c", "left", left="closed")
    seen = replace(WATCHED, round_number=0, met_min_s=NOW, left_s={gone.seat: NOW - 1.5})
    snapshot = run([*map(node, "ab"), gone], listed="abc")
    assert decide(NOW, snapshot, seen, POLICY).wake_at_s == NOW + 0.5
    assert look(look(WATCHED, snapshot), snapshot, now=NOW + 9).left_s == {gone.seat: NOW}
    assert look(look(WATCHED, snapshot), run(map(node, "abc"))).left_s == {}


def test_who_left_to_ask_again_is_waited_for_from_when_it_can() -> None:
    gone = node("c", "left", left="exit")
    ended = run([gone, node("d", "left")], world("cd"))
    opened = run([*map(node, "ab"), gone], Round(4), listed="abc")
    seen = look(look(WATCHED, ended), opened, now=NOW + 60)
    assert decide(NOW + 60, opened, seen, POLICY).wake_at_s == NOW + 60 + POLICY.last_call_s
    seen = look(seen, opened, now=NOW + 61)
    assert decide(NOW + 61, opened, seen, POLICY).wake_at_s == NOW + 60 + POLICY.last_call_s


def test_who_is_quarantined_is_not_waited_for() -> None:
    membership = members("abc", quarantined="c")
    snapshot = run([*map(node, "ab"), node("c", "left", left="closed")], membership=membership)
    assert decide(NOW, snapshot, WATCHED, POLICY).round is not None


@pytest.mark.parametrize(("number", "waits_s"), [(0, 30.0), (4, 2.0)])
def test_fewer_than_desired_wait_for_the_last_call(number: int, waits_s: float) -> None:
    snapshot = run(map(node, "ab"), Round(number), listed="ab")
    policy = replace(POLICY, desired=3)
    seen = replace(WATCHED, round_number=number, met_min_s=NOW)
    assert decide(NOW, snapshot, seen, policy).wake_at_s == NOW + waits_s
    assert decide(NOW + waits_s, snapshot, seen, policy).round is not None


def test_the_last_call_begins_anew_when_there_are_too_few_again() -> None:
    two, one = run(map(node, "ab"), listed="abc"), run(map(node, "a"), listed="abc")
    seen = look(RoundObservations(), two, now=10)
    assert look(seen, two, now=20).met_min_s == 10
    assert look(seen, one, now=20).met_min_s is None
    assert look(look(seen, one, now=20), two, now=30).met_min_s == 30


@pytest.mark.parametrize(
    ("nodes", "opens"),
    [
        ([node("a", "left"), node("b", ask=2)], True),
        ([node("a", "left"), node("b", "in")], False),
        ([node("a", "left"), node("b", "left")], False),
        ([node("a", "left"), node("d")], True),
        ([node("a", "left"), node("e")], True),
        ([node("a", "left"), node("b", "in"), node("d")], False),
        ([node("d")], True),
    ],
    ids=[
        "one asks again",
        "one is still in it",
        "nobody asks",
        "another one asks",
        "a spare asks",
        "another one asks while one is still in it",
        "all are gone without a word",
    ],
)
def test_a_run_closed_by_failure_opens_once_all_have_left_and_somebody_asks(
    nodes: list[Node], opens: bool
) -> None:
    failed = replace(world("ab"), closed="failure")
    decision = decide(NOW, run(nodes, failed), WATCHED, POLICY)
    assert decision.round == (next_round(failed) if opens else None)


def test_who_was_let_go_does_not_keep_a_failed_run_and_who_leaves_does_not_open_it() -> None:
    failed = replace(world("ab"), closed="failure")
    leaves = members("ab", leaving="b")
    inside = run([node("a", "left"), node("b", "in"), node("d")], failed)
    kept = decide(NOW, replace(inside, membership=leaves), WATCHED, POLICY)
    assert kept.round is None
    let_go = replace(leaves, granted=frozenset("b"))
    opened = decide(NOW, replace(inside, membership=let_go), WATCHED, POLICY)
    assert opened.round == next_round(failed)
    asks = run([node("a", "left"), node("b", ask=2)], failed)
    assert decide(NOW, replace(asks, membership=leaves), WATCHED, POLICY).round is None


def test_a_run_closed_by_success_forms_no_round() -> None:
    decision = decide(NOW, run(map(node, "abcd"), Round(closed="success")), WATCHED, POLICY)
    assert decision.round is None
    assert decision.reason == "the run is closed by success"


# --- over, and gone ---


def look(
    seen: RoundObservations,
    snapshot: RunSnapshot,
    *,
    now: float = NOW,
    healthy_s: float = 100.0,
    cut_off: bool = False,
) -> RoundObservations:
    return observe(now, seen, snapshot, POLICY, healthy_s=healthy_s, cut_off=cut_off)


def what_follows(snapshot: RunSnapshot, seen: RoundObservations) -> RoundDecision:
    """Decide, and once more if it was that the world must form again."""
    decision = decide(NOW, snapshot, seen, POLICY)
    if decision.round is None or not decision.round.ends:
        return decision
    assert decision.round == replace(snapshot.round, ends=decision.round.ends)
    return decide(NOW, replace(snapshot, round=decision.round), seen, POLICY)


@pytest.mark.parametrize(
    ("b", "standing"),
    [
        (node("b", "in"), "here"),
        (node("b", "asking"), "here"),
        (node("b", "left"), "left"),
        (node("b", "left", left="hung"), "left"),
        (node("b", "left", left="done"), "done"),
        (node("b", "asking", ask=2), "replaced"),
        (node("b", "in", nonce="other"), "replaced"),
        (None, "missing"),
    ],
)
def test_where_a_frozen_node_stands(b: Node | None, standing: str) -> None:
    snapshot = run([*inside("a"), *([b] if b else [])], world("ab"))
    standings = stand(NOW, snapshot, look(WATCHED, snapshot), POLICY)
    assert standings.of[Seat("b", "n", 1)] == standing
    assert standings.lost == (["b"] if standing in ("left", "replaced") else [])


ONE, LATER = (inside("a"), 0, 100.0), [node("d")]
FINISHED = [replace(node("a", "in"), finished=True), node("d")]


@pytest.mark.parametrize(
    ("looks", "current", "cut_off", "gone_s"),
    [
        ([ONE], world("ab"), False, POLICY.confirm_s),
        ([ONE, (inside("a"), 10, 0.0), (inside("a"), 20, 1.0)], world("ab"), False, 35),
        ([ONE, (inside("a"), 10, 0.0), (inside("a"), 100, 1.0)], world("ab"), False, 115),
        ([ONE], world("ab"), True, 15),
        (
            [
                (LATER, 0, 100.0),
                (LATER, 40, 140.0),
                ([*inside("a"), *LATER], 50, 150.0),
                ([*inside("a"), *LATER], 60, 160.0),
            ],
            world("abc"),
            False,
            65,
        ),
        (
            [([*inside("a"), node("c")], 0, 100.0)],
            world("ab", finishing=True),
            False,
            POLICY.orphan_hold_s,
        ),
        (
            [([*FINISHED, node("c"), node("d")], 0, 100.0)],
            world("ab", finishing=True),
            False,
            POLICY.confirm_s,
        ),
    ],
    ids=[
        "it stays away",
        "after a gap of the watch",
        "after a long outage",
        "after a cut that we were in ourselves",
        "after the first of a world that had vanished as a whole",
        "while others finish",
        "all others have finished",
    ],
)
def test_a_missing_node_is_gone_once_it_has_had_time_to_return(
    looks: list[tuple[list[Node], int, float]], current: Round, cut_off: bool, gone_s: float
) -> None:
    seen = WATCHED
    for nodes, after_s, healthy_s in looks:
        snapshot = run(nodes, current)
        seen = look(seen, snapshot, now=NOW + after_s, healthy_s=healthy_s, cut_off=cut_off)
    assert not stand(NOW + gone_s - 0.1, snapshot, seen, POLICY).lost
    assert stand(NOW + gone_s, snapshot, seen, POLICY).lost


def test_i5_what_a_sidecar_misses_at_its_start_may_have_been_cut_off_before() -> None:
    """Others that started again in the same outage may need longer to come back."""
    snapshot = run(inside("a"), world("ab"))
    seen = look(RoundObservations(), snapshot)
    assert not stand(NOW + POLICY.return_s - 0.1, snapshot, seen, POLICY).lost
    assert stand(NOW + POLICY.return_s, snapshot, seen, POLICY).lost
    whole = look(RoundObservations(), run(inside("ab"), world("ab")))
    seen = look(whole, snapshot, now=NOW + 1, healthy_s=101)
    assert stand(NOW + 1 + POLICY.confirm_s, snapshot, seen, POLICY).lost == ["b"]


def test_the_moment_when_a_missing_node_will_be_gone_is_told_and_void_once_it_is_back() -> None:
    snapshot = run(inside("a"), world("ab"))
    seen = look(WATCHED, snapshot)
    assert stand(NOW, snapshot, seen, POLICY).wake_at_s == NOW + POLICY.confirm_s
    assert look(seen, run(inside("ab"), world("ab"))).missing_s == {}


def test_nobody_is_gone_while_the_watch_proves_nothing() -> None:
    snapshot = run(inside("a"), world("ab"))
    seen = look(look(WATCHED, snapshot), snapshot, now=NOW + 10, healthy_s=0.0)
    assert not stand(NOW + 1000, snapshot, seen, POLICY).lost


@pytest.mark.parametrize(
    ("others", "gone_after_s"),
    [
        ([], math.inf),
        ([node("c")], 60.0),
        ([node("e")], math.inf),
        ([node("a", "left", left="done"), node("c")], 60.0),
        ([node("a", "left", left="exit")], 4.0),
    ],
    ids=["nobody asks", "one asks", "a spare looks on", "one was done", "one left"],
)
def test_all_that_vanish_at_once_are_held(others: list[Node], gone_after_s: float) -> None:
    snapshot = run(others, world("ab"))
    seen = look(WATCHED, snapshot)
    assert stand(NOW, snapshot, seen, POLICY).wake_at_s == NOW + gone_after_s
    before = stand(NOW + min(gone_after_s, 1e6) - 0.1, snapshot, seen, POLICY)
    assert before.of[Seat("b", "n", 1)] == "missing"
    if gone_after_s < math.inf:
        assert decide(NOW + gone_after_s, snapshot, seen, POLICY).round is not None


@pytest.mark.parametrize(
    ("nodes", "granted", "over"),
    [
        (inside("ab"), "", False),
        ([*inside("a"), node("b", "left")], "", False),
        ([*inside("a"), node("b", "left")], "a", True),
        ([node("a", "left"), node("b", "left")], "", True),
        ([node("a", "left"), node("b", ask=2)], "", True),
        ([node("a", "left", left="done"), node("b", "left", left="done")], "", True),
        (inside("ab"), "ab", True),
    ],
)
def test_over(nodes: list[Node], granted: str, over: bool) -> None:
    membership = members("abcd", leaving=granted, granted=granted)
    snapshot = run(nodes, world("ab"), membership=membership)
    decision = what_follows(snapshot, look(WATCHED, snapshot))
    assert decision.round == (next_round(snapshot.round) if over else None)
    assert ("is over" in decision.reason) == over


@pytest.mark.parametrize(
    ("granted", "stay", "finishing", "over"),
    [
        ("", "a", False, False),
        ("a", "a", False, True),
        ("a", "ac", False, False),
        ("a", "a", True, True),
        ("", "a", True, False),
    ],
    ids=[
        "not let go",
        "let go",
        "one has not left yet",
        "let go while others finish",
        "not let go while others finish",
    ],
)
def test_i1_a_lost_round_is_not_over_while_a_leaver_is_in_it_that_was_not_let_go(
    granted: str, stay: str, finishing: bool, over: bool
) -> None:
    membership = members("bcd", leaving="a", granted=granted)
    others = [node("b", "left"), *inside(stay.removeprefix("a"))]
    names = "a" + "".join(other.member for other in others)
    snapshot = run(
        [*inside("a"), *others], world(names, finishing=finishing), membership=membership
    )
    decision = what_follows(snapshot, look(WATCHED, snapshot))
    assert (decision.round is not None) == over


def test_a_round_that_finishes_is_left_in_peace_whatever_is_granted() -> None:
    membership = members("cd", leaving="ab", granted="ab", ends_round=True)
    snapshot = run(inside("ab"), world("ab", finishing=True), membership=membership)
    assert decide(NOW, snapshot, look(WATCHED, snapshot), POLICY).round is None


@pytest.mark.parametrize("closed", ["", "failure"])
@pytest.mark.parametrize(
    ("others", "over"),
    [
        ([node("b", "in"), node("c", "left", left="closed")], False),
        ([node("b", ask=2), node("c", "left", left="closed")], False),
        ([node("b", ask=2), node("c", ask=2)], True),
        ([node("b", ask=2), node("c", nonce="other"), node("d")], True),
        ([replace(node("b", "in"), finished=True), node("c", ask=2)], False),
        ([replace(node("b", "in"), finished=True), node("c", ask=2), node("d")], True),
        ([node("b", "left", left="closed"), node("c", "left", left="closed")], False),
    ],
    ids=[
        "one trains still",
        "too few ask",
        "both ask again",
        "one comes back, and a spare",
        "another one is done, and too few ask",
        "another one is done, and enough ask",
        "nobody asks",
    ],
)
def test_who_is_done_is_waited_for_until_others_are_enough_to_go_on(
    others: list[Node], closed: ClosedWhy, over: bool
) -> None:
    done = replace(node("a", "in"), finished=True)
    current = replace(world("abc", finishing=True), closed=closed)
    decision = what_follows(run([done, *others], current), WATCHED)
    assert decision.round == (next_round(current) if over else None)


@pytest.mark.parametrize("then", [None, node("b", nonce="other")], ids=["vanishes", "restarts"])
@pytest.mark.parametrize(
    "done",
    [replace(node("b", "in"), finished=True), node("b", "left", left="done")],
    ids=["in the barrier", "ended"],
)
def test_one_that_has_finished_is_not_lost(done: Node, then: Node | None) -> None:
    current = world("abc", finishing=True)
    seen = look(WATCHED, run([*inside("ac"), done], current))
    gone = run([*inside("ac"), *([then] if then else [])], current)
    seen = look(seen, gone)
    standings = stand(NOW + 1e6, gone, seen, POLICY)
    assert standings.of[Seat("b", "n", 1)] == "done"
    assert not standings.lost
    assert look(seen, run(inside("ac"), replace(current, number=4))).done == frozenset()


@pytest.mark.parametrize(
    ("b", "goes_on", "let_go"),
    [
        (node("b", "in"), True, False),
        (replace(node("b", "in"), finished=True), False, False),
        (node("b", ask=2), True, True),
        (node("b", "left", left="exit"), True, True),
        (node("b", "left", left="closed"), False, False),
        (node("b", "left", left="done"), False, False),
        (node("b", nonce="other"), True, False),
        (node("b", "left", nonce="other", left="closed"), False, False),
        (node("b", "left", ask=2, left="closed"), True, True),
        (None, False, False),
    ],
)
def test_whether_one_of_the_world_goes_on_without_the_others(
    b: Node | None, goes_on: bool, let_go: bool
) -> None:
    """``let_go``: whether it does though it was let go."""
    done = [replace(one, finished=True) for one in inside("a")]
    snapshot = run([*done, *([b] if b else [])], world("ab", finishing=True), listed="ab")
    gone = replace(snapshot, membership=members("a", leaving="b", granted="b"))
    for seen, expected in ((snapshot, goes_on), (gone, let_go)):
        standings = stand(NOW, seen, look(WATCHED, seen), POLICY)
        assert somebody_goes_on(seen, standings) == expected


# --- whatever comes ---

MEMBERS = st.sampled_from("abcde")
NODES = st.builds(
    node,
    MEMBERS,
    st.sampled_from(["asking", "in", "left"]),
    revision=st.integers(1, 99),
    ask=st.integers(1, 2),
    number=st.integers(2, 4),
)
SETS = st.frozensets(MEMBERS)
SNAPSHOTS = st.builds(
    run,
    st.lists(NODES, max_size=5),
    st.sampled_from(["", "ab", "abc"]).map(lambda who: world(who) if who else Round(3)),
    membership=st.builds(RoundMembers, SETS, SETS, SETS, SETS, st.booleans()),
)


@given(SNAPSHOTS, st.integers(1, 3), st.integers(0, 2), st.floats(0, 1e6), st.booleans())
def test_decide_is_total_and_freezes_only_who_asked(
    snapshot: RunSnapshot, least: int, room: int, later_s: float, cut_off: bool
) -> None:
    policy = RoundPolicy(least, least + room)
    seen = look(RoundObservations(), snapshot, cut_off=cut_off)
    decision = decide(NOW + later_s, snapshot, seen, policy)
    assert decision.reason
    assert decision.wake_at_s > NOW + later_s
    if decision.round is None:
        return
    assert decision.round.mod_revision == snapshot.round.mod_revision
    if decision.round.ends:
        assert decision.round == replace(snapshot.round, ends=decision.round.ends)
    elif decision.round.complete:
        assert least <= len(decision.round.frozen) <= least + room
        for seat in decision.round.frozen:
            asked = snapshot.nodes[seat.member]
            assert (asked.seat, asked.state) == (seat, "asking")
            assert snapshot.membership.may_join(seat.member)
    else:
        assert decision.round.number == snapshot.round.number + 1
        assert not [
            seat
            for seat in snapshot.round.frozen
            if seat.member not in snapshot.membership.granted
            and (n := snapshot.nodes.get(seat.member)) is not None
            and n.seat == seat
            and n.state != "left"
        ]


@given(SNAPSHOTS, st.floats(0, 1e6))
def test_standings_name_every_frozen_node(snapshot: RunSnapshot, later_s: float) -> None:
    standings: Standings = stand(
        NOW + later_s, snapshot, look(RoundObservations(), snapshot), POLICY
    )
    assert set(standings.of) == set(snapshot.round.frozen)


def test_a_stream_that_hangs_is_no_proof_that_a_node_stayed_away() -> None:
    assert WATCH_PROGRESS_S < HEALTHY_S < RoundPolicy(1, 1).confirm_s
