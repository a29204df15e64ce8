# SPDX-License-Identifier: Apache-2.0
"""Every order in which joins, ends, drains, cuts and late writes of a few nodes can happen.

Checked at each step: all that are handed a round are handed the same world; nobody is frozen who
did not ask, or who leaves; no world is smaller than ``min``; a round is over only once nobody is
left in it but who leaves. And wherever it ends: all that live and stay are in one world, or are too
few and wait, and whoever was told to go is gone.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import get_args

import pytest

from launcher_shim.c10d.rounds.inputs import RoundPolicy
from tests.support.models.rounds import Broken, Fault, Rules, explore, walk

TWO = Rules(2, RoundPolicy(2, 2))
STATES_MAX = 400_000


def alone(fault: Fault) -> Rules:
    return replace(TWO, faults=(fault,))


@pytest.mark.parametrize("policy", [RoundPolicy(2, 2), RoundPolicy(1, 2), RoundPolicy(2, 3)])
def test_two_nodes_form_one_world_in_any_order(policy: RoundPolicy) -> None:
    explored = explore(replace(TWO, policy=policy, calm=True), faults=0, states_max=STATES_MAX)
    assert explored.exhausted
    assert explored.ends > 0


@pytest.mark.parametrize("fault", ["fail", "crash", "lose_answer", "land_late", "close", "hurry"])
def test_i1_one_fault_at_any_moment(fault: Fault) -> None:
    explored = explore(alone(fault), faults=1, states_max=STATES_MAX)
    assert explored.exhausted
    assert explored.ends > 0


def test_i11_a_run_given_up_at_any_of_the_first_thousands_of_moments() -> None:
    assert explore(alone("give_up"), faults=1, states_max=3000).states == 2999


def test_i1_a_torchrun_killed_at_any_of_the_first_thousands_of_moments() -> None:
    assert explore(alone("kill"), faults=1, states_max=3000).states == 2999


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
    assert all(walk(Rules(nodes, policy), 5, Random(seed)) > 10 for seed in range(8))


def test_i11_nobody_stays_in_a_world_of_nowhere_when_its_first_rank_returns() -> None:
    rules = replace(alone("cut"), meets=True)
    assert explore(rules, faults=1, states_max=3000).states == 2999
    for nodes, policy in ((2, RoundPolicy(2, 2)), (3, RoundPolicy(2, 3)), (3, RoundPolicy(3, 3))):
        rules = Rules(nodes, policy, faults=("cut", "lapse", "kill"), meets=True)
        assert all(walk(rules, 3, Random(seed)) > 10 for seed in range(20))


@pytest.mark.parametrize("nodes", [2, 3])
def test_i11_those_that_are_parked_while_a_round_does_not_form_are_in_it_when_it_does(
    nodes: int,
) -> None:
    rules = Rules(nodes, RoundPolicy(2, 2), waits_long=True)
    explored = explore(replace(rules, nodes=2, calm=True), faults=0, states_max=STATES_MAX)
    assert explored.exhausted
    assert explored.ends > 0
    assert all(walk(rules, 4, Random(seed)) > 10 for seed in range(10))


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
        assert walk(Rules(nodes, policy, never=never), 5, Random(seed)) > 10


def test_i11_a_spare_and_a_launcher_that_never_comes_at_any_of_the_first_moments() -> None:
    rules = Rules(3, RoundPolicy(2, 2), never="a", calm=True)
    explored = explore(rules, faults=0, states_max=STATES_MAX)
    assert explored.exhausted
    assert explored.ends > 0


@pytest.mark.parametrize("commits", [False, True])
def test_i2_a_drain_at_any_of_the_first_thousands_of_moments(commits: bool) -> None:
    rules = replace(alone("drain"), commits=commits)
    assert explore(rules, faults=1, states_max=1500).states == 1499


@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize("others", [(), ("cancel",), ("kill", "replace"), ("crash", "fail")])
def test_i2_drains_joins_and_losses_in_random_orders(
    others: tuple[Fault, ...], commits: bool
) -> None:
    for nodes, policy in ((2, RoundPolicy(1, 2)), (3, RoundPolicy(2, 3)), (3, RoundPolicy(1, 2))):
        rules = Rules(nodes, policy, faults=("drain", *others), commits=commits)
        assert all(walk(rules, 4, Random(seed)) > 10 for seed in range(5))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize("rules", [TWO, Rules(3, RoundPolicy(2, 3)), Rules(3, RoundPolicy(1, 2))])
def test_i2_two_drains_as_far_as_it_goes(rules: Rules, commits: bool) -> None:
    rules = replace(rules, faults=("drain",), commits=commits)
    assert explore(rules, faults=2, states_max=STATES_MAX).states > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", get_args(Fault))
@pytest.mark.parametrize("policy", [RoundPolicy(1, 2), RoundPolicy(2, 2)])
def test_i1_one_fault_of_each_kind_exhausted(fault: Fault, policy: RoundPolicy) -> None:
    rules = replace(alone(fault), policy=policy)
    assert explore(rules, faults=1, states_max=STATES_MAX).exhausted


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", ["cut", "lapse", "kill"])
def test_i11_one_that_is_away_when_they_meet_exhausted(fault: Fault) -> None:
    rules = replace(alone(fault), meets=True)
    assert explore(rules, faults=1, states_max=STATES_MAX).exhausted


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_i1_three_nodes_form_one_world_in_any_order() -> None:
    for policy in (RoundPolicy(2, 3), RoundPolicy(1, 3), RoundPolicy(2, 2)):
        rules = Rules(3, policy, calm=True)
        assert explore(rules, faults=0, states_max=STATES_MAX).exhausted


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rules", [TWO, Rules(3, RoundPolicy(2, 3)), Rules(3, RoundPolicy(2, 2))])
def test_i1_two_faults_as_far_as_it_goes(rules: Rules) -> None:
    assert explore(rules, faults=2, states_max=STATES_MAX).states > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("nodes", [3, 4, 5])
def test_i1_thousands_of_random_orders(nodes: int) -> None:
    for most in (nodes - 1, nodes):
        for least in (1, 2):
            rules = Rules(nodes, RoundPolicy(least, most))
            assert all(walk(rules, 8, Random(seed), 20_000) > 10 for seed in range(500))


# --- tests of the test: each of these must be found ---


def broken_within(rules: Rules, faults: int) -> str:
    """Look for a violation, in random orders, and return what was found first."""
    for seed in range(600):
        try:
            walk(rules, faults, Random(seed))
        except Broken as broken:
            return str(broken)
    return ""


def test_a_round_frozen_without_the_range_compare_is_found() -> None:
    found = broken_within(Rules(3, RoundPolicy(2, 3), range_compare=False), 4)
    assert "is frozen, but it is left" in found or "is over, but" in found


def test_a_round_frozen_without_a_look_at_the_drains_is_found() -> None:
    rules = Rules(3, RoundPolicy(2, 3), faults=("drain",), drains_compare=False)
    assert "is frozen, but it leaves" in broken_within(rules, 2)


def test_a_place_that_goes_to_an_older_one_that_comes_back_is_found() -> None:
    rules = Rules(3, RoundPolicy(2, 2), faults=("kill", "crash", "fail"), keeps_places=False)
    assert "have the places" in broken_within(rules, 4)


def test_a_leaver_that_is_not_told_that_its_world_is_lost_is_found() -> None:
    rules = Rules(3, RoundPolicy(1, 3), faults=("drain", "kill", "crash"), leavers_told=False)
    assert "nobody lets them go" in broken_within(rules, 3)


def test_i1_a_round_that_is_over_while_a_leaver_trains_on_in_it_is_found() -> None:
    rules = Rules(3, RoundPolicy(1, 3), faults=("drain", "cut", "kill"), leavers_excused=True)
    assert "is over, but" in broken_within(rules, 3)


def test_a_round_kept_because_who_was_let_in_has_vanished_is_found() -> None:
    rules = Rules(2, RoundPolicy(1, 2), faults=("hurry", "crash"), saves_end_rounds=False)
    assert "whose ranks stand still for ever" in broken_within(rules, 2)


def test_a_world_shown_without_those_that_are_gone_is_found() -> None:
    found = broken_within(Rules(3, RoundPolicy(2, 3), whole_world=False), 4)
    assert "was handed" in found


def test_nodes_told_apart_by_create_revision_are_found() -> None:
    rules = replace(alone("kill"), by_create_revision=True)
    with pytest.raises(Broken, match="which it did not ask for"):
        explore(rules, faults=1, states_max=20_000)


def test_i11_fillers_that_are_forgotten_are_found() -> None:
    rules = replace(alone("cut"), meets=True, fillers_latched=False)
    assert "in a world of nowhere" in broken_within(rules, 1)


def test_i11_a_run_that_stays_closed_by_failure_is_found() -> None:
    found = broken_within(replace(alone("give_up"), failures_reopen=False), 1)
    assert "closed by failure" in found or "no end" in found


def test_i6_a_write_of_a_stale_incarnation_is_found() -> None:
    rules = replace(TWO, faults=("lapse", "land_late"), incarnation_compare=False)
    assert "it is stale" in broken_within(rules, 4)
