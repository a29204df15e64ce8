# SPDX-License-Identifier: Apache-2.0
"""Every order in which joins, ends, drains, cuts and late writes of a few nodes can happen.

Checked at each step: all that are handed a round are handed the same world; nobody is frozen who
did not ask, or who leaves; no world is smaller than ``min``; a round is over only once nobody is
left in it but who leaves. And wherever it ends: all that live and stay are in one world, or are too
few and wait, and whoever was told to go is gone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from launcher_shim.c10d.rounds.inputs import RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.observations import RoundObservations
from launcher_shim.c10d.rounds.world import Reform, reform
from tests.support.models.explorer import Broken, explore, first_broken, walk
from tests.support.models.rounds import FAULTS, Fault, Rounds, Rules

TWO = Rules(2, RoundPolicy(2, 2))
STATES_MAX = 400_000


def alone(fault: Fault) -> Rules:
    return replace(TWO, faults=(fault,))


def exhausted(model: Rounds) -> None:
    explored = explore(model, STATES_MAX)
    assert explored.exhausted
    assert explored.ends > 0


@pytest.mark.parametrize("policy", [RoundPolicy(2, 2), RoundPolicy(1, 2), RoundPolicy(2, 3)])
def test_two_nodes_form_one_world_in_any_order(policy: RoundPolicy) -> None:
    exhausted(Rounds(replace(TWO, policy=policy, calm=True), 0))


@pytest.mark.parametrize("fault", ["fail", "crash", "lose_answer", "land_late", "close", "hurry"])
def test_i1_one_fault_at_any_moment(fault: Fault) -> None:
    exhausted(Rounds(alone(fault), 1))


def test_i11_a_run_given_up_at_any_of_the_first_thousands_of_moments() -> None:
    assert explore(Rounds(alone("give_up"), 1), 3000).states == 3000


def test_i1_a_torchrun_killed_at_any_of_the_first_thousands_of_moments() -> None:
    assert explore(Rounds(alone("kill"), 1), 3000).states == 3000


@pytest.mark.parametrize(
    ("nodes", "policy"),
    [
        (2, RoundPolicy(1, 2)),
        (2, RoundPolicy(2, 2)),
        (3, RoundPolicy(2, 3)),
        (3, RoundPolicy(1, 3)),
        (3, RoundPolicy(2, 2)),
        (3, RoundPolicy(2, 4)),
        (4, RoundPolicy(2, 3)),
    ],
)
def test_i1_many_faults_in_random_orders(nodes: int, policy: RoundPolicy) -> None:
    assert all(walk(Rounds(Rules(nodes, policy), 5), Random(seed)) > 10 for seed in range(8))


def test_i11_a_store_that_refuses_writes_ends_no_world_whatever_lapses() -> None:
    """Nobody leaves before that is written; once writes are taken, all that live are one world."""
    rules = replace(TWO, faults=("refuse", "lapse", "cut"))
    assert explore(Rounds(rules, 2), 3000).states == 3000
    for nodes, policy in ((3, RoundPolicy(2, 3)), (3, RoundPolicy(1, 3)), (4, RoundPolicy(2, 3))):
        rules = Rules(nodes, policy, faults=("refuse", "lapse", "cut", "crash", "kill", "drain"))
        assert all(walk(Rounds(rules, 5), Random(seed)) > 10 for seed in range(10))


def test_i11_nobody_stays_in_a_world_of_nowhere_when_its_first_rank_returns() -> None:
    rules = replace(alone("cut"), meets=True)
    assert explore(Rounds(rules, 1), 3000).states == 3000
    for nodes, policy in ((2, RoundPolicy(2, 2)), (3, RoundPolicy(2, 3)), (3, RoundPolicy(3, 3))):
        rules = Rules(nodes, policy, faults=("cut", "lapse", "kill"), meets=True)
        assert all(walk(Rounds(rules, 3), Random(seed)) > 10 for seed in range(20))


@pytest.mark.parametrize("nodes", [2, 3])
def test_i11_those_that_are_parked_while_a_round_does_not_form_are_in_it_when_it_does(
    nodes: int,
) -> None:
    rules = Rules(nodes, RoundPolicy(2, 2), waits_long=True)
    exhausted(Rounds(replace(rules, nodes=2, calm=True), 0))
    assert all(walk(Rounds(rules, 4), Random(seed)) > 10 for seed in range(10))


@pytest.mark.parametrize(
    ("nodes", "policy", "never"),
    [
        (3, RoundPolicy(2, 2), ""),
        (3, RoundPolicy(2, 2), "a"),
        (4, RoundPolicy(3, 3), "b"),
        (4, RoundPolicy(1, 2), "a"),
        (5, RoundPolicy(2, 3), "ac"),
    ],
)
def test_i11_spares_take_the_places_of_launchers_that_never_come(
    nodes: int, policy: RoundPolicy, never: str
) -> None:
    for seed in range(8):
        assert walk(Rounds(Rules(nodes, policy, never=never), 5), Random(seed)) > 10


def test_i11_a_spare_and_a_launcher_that_never_comes_at_any_of_the_first_moments() -> None:
    rules = Rules(3, RoundPolicy(2, 2), never="a", calm=True)
    exhausted(Rounds(rules, 0))


@pytest.mark.parametrize("commits", [False, True])
def test_i2_a_drain_at_any_of_the_first_thousands_of_moments(commits: bool) -> None:
    rules = replace(alone("drain"), commits=commits)
    assert explore(Rounds(rules, 1), 1500).states == 1500


@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize("others", [(), ("cancel",), ("kill", "replace"), ("crash", "fail")])
def test_i2_drains_joins_and_losses_in_random_orders(
    others: tuple[Fault, ...], commits: bool
) -> None:
    for nodes, policy in ((2, RoundPolicy(1, 2)), (3, RoundPolicy(2, 3)), (3, RoundPolicy(1, 2))):
        rules = Rules(nodes, policy, faults=("drain", *others), commits=commits)
        assert all(walk(Rounds(rules, 4), Random(seed)) > 10 for seed in range(5))


SET = {
    "more": (RoundPolicy(1, 2), RoundPolicy(1, 3)),
    "a pause": (RoundPolicy(2, 3), RoundPolicy(2, 3, paused=True)),
    "sizes": (RoundPolicy(1, 4), RoundPolicy(1, 4, sizes=(1, 3))),
    "multiples": (RoundPolicy(2, 4, unit=2), RoundPolicy(1, 3)),
}


@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize(("policy", "later"), SET.values(), ids=SET)
def test_i11_bounds_that_are_set_at_any_time_become_the_world(
    policy: RoundPolicy, later: RoundPolicy, commits: bool
) -> None:
    few = replace(alone("set"), commits=commits, policy=policy, later=later)
    assert explore(Rounds(few, 1), 1000).states == 1000
    rules = Rules(4, policy, commits=commits, later=later, waits_long=True)
    quiet = replace(rules, faults=("set", "drain", "kill", "fail", "crash"))
    for one in (rules, quiet):
        assert all(walk(Rounds(one, 5), Random(seed)) > 10 for seed in range(6))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize("rules", [TWO, Rules(3, RoundPolicy(2, 3)), Rules(3, RoundPolicy(1, 2))])
def test_i2_two_drains_as_far_as_it_goes(rules: Rules, commits: bool) -> None:
    rules = replace(rules, faults=("drain",), commits=commits)
    assert explore(Rounds(rules, 2), STATES_MAX).states > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("policy", [RoundPolicy(1, 2), RoundPolicy(2, 2)])
def test_i1_one_fault_of_each_kind_exhausted(fault: Fault, policy: RoundPolicy) -> None:
    rules = replace(alone(fault), policy=policy)
    assert explore(Rounds(rules, 1), STATES_MAX).exhausted


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", ["cut", "lapse", "kill"])
def test_i11_one_that_is_away_when_they_meet_exhausted(fault: Fault) -> None:
    rules = replace(alone(fault), meets=True)
    assert explore(Rounds(rules, 1), STATES_MAX).exhausted


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_i1_three_nodes_form_one_world_in_any_order() -> None:
    for policy in (RoundPolicy(2, 3), RoundPolicy(1, 3), RoundPolicy(2, 2)):
        rules = Rules(3, policy, calm=True)
        assert explore(Rounds(rules, 0), STATES_MAX).exhausted


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rules", [TWO, Rules(3, RoundPolicy(2, 3)), Rules(3, RoundPolicy(2, 2))])
def test_i1_two_faults_as_far_as_it_goes(rules: Rules) -> None:
    assert explore(Rounds(rules, 2), STATES_MAX).states > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("nodes", [3, 4, 5])
def test_i1_thousands_of_random_orders(nodes: int) -> None:
    for most in (nodes - 1, nodes):
        for least in (1, 2):
            rules = Rules(nodes, RoundPolicy(least, most))
            assert all(
                walk(Rounds(rules, 8), Random(seed), steps_max=20_000) > 10 for seed in range(500)
            )


# --- tests of the test: each of these must be found ---


def never(*causes: str) -> Callable[..., Reform]:
    """Decide as the product does, but for these causes."""

    def decided(*args: Any) -> Reform:
        found = reform(*args)
        return Reform() if found.cause in causes else found

    return decided


def whoever_asks_joins(
    now: float, snapshot: RunSnapshot, observations: RoundObservations, policy: RoundPolicy
) -> Reform:
    """Let in also those with whom no allowed size comes about."""
    asks = snapshot.round.complete and snapshot.newcomers()
    return Reform("join", "planted") if asks else reform(now, snapshot, observations, policy)


PLANTED = {
    "frozen without the range compare": (
        Rules(3, RoundPolicy(2, 3), range_compare=False),
        4,
        r"is frozen, but it is left|is over, but",
    ),
    "i2 frozen without a look at the drains": (
        Rules(3, RoundPolicy(2, 3), faults=("drain",), drains_compare=False),
        2,
        "is frozen, but it leaves",
    ),
    "a place goes to an older one that comes back": (
        Rules(3, RoundPolicy(2, 2), faults=("kill", "crash", "fail"), keeps_places=False),
        4,
        "have the places",
    ),
    "a leaver is not told that its world is lost": (
        Rules(3, RoundPolicy(1, 3), faults=("drain", "kill", "crash"), leavers_told=False),
        3,
        "nobody lets them go",
    ),
    "i1 over while a leaver trains on in it": (
        Rules(3, RoundPolicy(1, 3), faults=("drain", "cut", "kill"), leavers_excused=True),
        3,
        "is over, but",
    ),
    "kept because who was let in has vanished": (
        Rules(2, RoundPolicy(1, 2), faults=("hurry", "crash"), saves_end_rounds=False),
        2,
        "whose ranks stand still for ever",
    ),
    "a world shown without those that are gone": (
        Rules(3, RoundPolicy(2, 3), whole_world=False),
        4,
        "was handed",
    ),
    "i11 a waiter is shown before the loss is written": (
        Rules(3, RoundPolicy(2, 3), faults=("refuse", "lapse", "cut"), written=False),
        4,
        "nobody has written that",
    ),
    "i11 a run stays closed by failure": (
        replace(alone("give_up"), failures_reopen=False),
        1,
        "closed by failure|no end",
    ),
    "i11 a world stays larger than it may be": (
        Rules(
            4,
            SET["sizes"][0],
            later=SET["sizes"][1],
            faults=("set",),
            commits=False,
            reforms=never("shrink"),
        ),
        1,
        "it ends with",
    ),
    "i11 a world trains on though the job is paused": (
        Rules(
            3,
            SET["a pause"][0],
            later=SET["a pause"][1],
            faults=("set",),
            commits=False,
            reforms=never("pause"),
        ),
        1,
        "it ends with",
    ),
    "a newcomer ends a world that it cannot join": (
        Rules(3, RoundPolicy(1, 3, unit=2), calm=True, commits=False, reforms=whoever_asks_joins),
        0,
        "is told to form again, though nothing has happened",
    ),
    "i6 a write of a stale incarnation": (
        replace(TWO, faults=("lapse", "land_late"), incarnation_compare=False),
        4,
        "it is stale",
    ),
}


@pytest.mark.parametrize(("rules", "faults", "found"), PLANTED.values(), ids=PLANTED)
def test_i1_i2_i6_i11_a_rule_that_is_left_out_is_missed(
    rules: Rules, faults: int, found: str
) -> None:
    assert re.search(found, first_broken(Rounds(rules, faults), range(600), steps_max=2000))


def test_nodes_told_apart_by_create_revision_are_found() -> None:
    rules = replace(alone("kill"), by_create_revision=True)
    with pytest.raises(Broken, match="which it did not ask for"):
        explore(Rounds(rules, 1), 20_000)
