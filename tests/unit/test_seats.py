# SPDX-License-Identifier: Apache-2.0
"""Who gets a place in the next round: one rule a test.

First those that were frozen in the last round and are still here, then those that ask, by age.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from launcher_shim.c10d.rounds.decision import decide, next_round
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.observations import RoundObservations, observe
from launcher_shim.c10d.rounds.records import LeftReason, Node, NodeState, Round
from launcher_shim.c10d.rounds.views import view
from launcher_shim.c10d.rounds.world import Reform, reform
from rdzv.store import KeyValue
from tests.support import records
from tests.support.records import node, world

NOW = 500.0
POLICY = RoundPolicy(min_nodes=3, max_nodes=3)
WATCHED = RoundObservations(
    healthy_since_s=NOW - 100, round_number=4, round_since_s=NOW, met_min_s=NOW
)


def run(
    nodes: Iterable[Node], current: Round | None = None, *, by_age: str = "abcd"
) -> RunSnapshot:
    ages = {member: age for age, member in enumerate(by_age)}
    return records.run(nodes, current, membership=RoundMembers(frozenset(by_age), ages=ages))


def after(members: str) -> Round:
    """The round that follows one in which ``members`` trained."""
    return next_round(world(members, mod_revision=0))


def seated(
    snapshot: RunSnapshot, seen: RoundObservations = WATCHED, policy: RoundPolicy = POLICY
) -> str:
    decision = decide(NOW, snapshot, seen, policy)
    return "".join(seat.member for seat in decision.round.frozen) if decision.round else ""


def test_a_standby_that_asks_has_the_place_of_a_launcher_that_never_came() -> None:
    assert seated(run(map(node, "acd"))) == "acd"


def test_among_those_who_ask_the_oldest_have_the_places() -> None:
    asking = [node(m, revision=r) for m, r in zip("dcba", (1, 2, 3, 4), strict=True)]
    assert seated(run(asking)) == "abc"
    assert seated(run(asking, by_age="dcba")) == "bcd"


def test_who_trained_keeps_its_place_from_an_older_one_that_comes_back() -> None:
    assert seated(run(map(node, "abcd"), after("bcd"))) == "bcd"
    assert (
        seated(run([node("a", left="closed", state="left"), *map(node, "bcd")], after("bcd")))
        == "bcd"
    )


@pytest.mark.parametrize("state", ["left", "in"])
def test_a_standby_leaves_the_place_to_who_is_about_to_ask_again(state: NodeState) -> None:
    snapshot = run([*map(node, "abd"), node("c", state)], after("abc"))
    decision = decide(NOW, snapshot, WATCHED, POLICY)
    assert (decision.round, decision.wake_at_s) == (None, NOW + POLICY.last_call_s)
    assert "waiting for c" in decision.reason
    assert decide(decision.wake_at_s, snapshot, WATCHED, POLICY).round is not None


@pytest.mark.parametrize("state", ["left", "in"])
def test_a_world_that_becomes_smaller_keeps_the_oldest_whoever_asks_first(state: NodeState) -> None:
    policy = replace(POLICY, min_nodes=1, max_nodes=2)
    snapshot = run([*map(node, "ac"), node("b", state), node("d", state)], after("abcd"))
    decision = decide(NOW, snapshot, WATCHED, policy)
    assert (decision.round, decision.wake_at_s) == (None, NOW + policy.last_call_s)
    assert decision.reason.endswith("waiting for b")
    late = decide(decision.wake_at_s, snapshot, WATCHED, policy).round
    assert late is not None
    assert [seat.member for seat in late.frozen] == ["a", "c"]
    # The youngest are on their way, too, and have no place.
    youngest = [node("c", state), node("d", state)]
    assert seated(run([*map(node, "ab"), *youngest], after("abcd")), policy=policy) == "ab"
    ended = node("b", "left", left="closed")
    assert seated(run([*map(node, "ac"), ended], after("abcd")), policy=policy) == "ac"


@pytest.mark.parametrize("reason", ["closed", "hung", "done"])
def test_nobody_keeps_a_place_for_a_torchrun_that_has_ended(reason: LeftReason) -> None:
    assert seated(run([*map(node, "abd"), node("c", "left", left=reason)], after("abc"))) == "abd"


def test_nobody_waits_at_a_re_form_for_a_launcher_that_never_came() -> None:
    policy = replace(POLICY, min_nodes=2)
    snapshot = run(map(node, "ab"), after("ab"), by_age="abc")
    seen = replace(WATCHED, absent_s={"c": NOW - policy.first_call_s})
    assert seated(snapshot, seen, policy) == "ab"
    recent = replace(WATCHED, absent_s={"c": NOW - 5})
    waits = decide(NOW, snapshot, recent, policy)
    assert (waits.round, waits.wake_at_s) == (None, NOW - 5 + policy.first_call_s)


def test_the_first_world_waits_for_its_first_call_from_when_it_could_form() -> None:
    policy = replace(POLICY, min_nodes=2)
    seen = replace(WATCHED, round_number=0, absent_s={"c": NOW - 500})
    waits = decide(NOW, run(map(node, "ab"), by_age="abc"), seen, policy)
    assert (waits.round, waits.wake_at_s) == (None, NOW + policy.first_call_s)


def test_a_member_is_absent_from_when_it_was_first_seen_without_a_torchrun() -> None:
    def look(seen: RoundObservations, nodes: str, now: float) -> RoundObservations:
        snapshot = run(map(node, nodes), by_age="ab")
        return observe(now, seen, snapshot, POLICY, healthy_s=9, cut_off=False)

    seen = look(RoundObservations(), "a", 10)
    assert look(seen, "a", 20).absent_s == {"b": 10}
    assert look(seen, "ab", 20).absent_s == {}
    assert look(look(seen, "ab", 20), "a", 30).absent_s == {"b": 30}


def test_a_standby_that_asks_is_no_newcomer_to_a_full_world() -> None:
    snapshot = run([node("a"), *(node(m, "in") for m in "bcd")], world("bcd"))
    reforms = reform(NOW, snapshot, WATCHED, POLICY)
    assert reforms == Reform()
    spare = view(snapshot, POLICY, node("a"), parked=False, parks=True)
    assert (spare.role, spare.full) == ("parked", True)


def test_who_trained_last_is_on_record_until_the_next_world_is() -> None:
    opened = after("cab")
    assert opened.former == ("c", "a", "b")
    kv = KeyValue("/r/round", opened.to_json(), 1, 7, 1, 0)
    assert Round.from_kv(kv) == replace(opened, mod_revision=7)
    frozen = decide(NOW, run(map(node, "abc"), opened), WATCHED, POLICY).round
    assert frozen is not None
    assert frozen.former == ()
