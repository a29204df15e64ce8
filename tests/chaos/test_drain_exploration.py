# SPDX-License-Identifier: Apache-2.0
"""Every order in which notices, votes, saves, crashes, cuts and joins of a few pods can happen.

Checked at each step: S lies ahead of every rank when it is agreed on, and nobody runs past it
(I3); a commit counts only once every rank has it on disk, and is on record before a leave is
granted (I7); nobody is let go below ``min`` before its deadline, unless no replacement can come
(I10); nobody who drains is in a new round (I2); no step is trained after a grant. And wherever it
ends, nobody waits for ever.
"""

from __future__ import annotations

from random import Random

import pytest

from rdzv.drain.inputs import DrainPolicy
from tests.support.models.drains import FAULTS, OUT_OF_TIME, Fault, Rules, State, World
from tests.support.models.explorer import after, explore, states_without_an_end, walk

COMMIT_BELOW_MIN = DrainPolicy(below_min="commit")


def exhausted(world: World, first: State | None = None) -> None:
    explored = explore(world, 400_000, first)
    assert explored.exhausted
    assert explored.ends > 0


def test_i3_i7_one_drain_of_two_pods_in_any_order() -> None:
    exhausted(World(Rules(boundaries=1)))


def test_i3_several_ranks_in_a_pod_in_any_order() -> None:
    exhausted(World(Rules(members=1, ranks=2, boundaries=3, hurry=1)))


def test_i3_a_join_in_any_order() -> None:
    rules = Rules(members=1, joiners=1, boundaries=1, notices=())
    assert explore(World(rules), 400_000).exhausted


@pytest.mark.parametrize("cursors", [("a", "b"), ("a", "")], ids=["two differ", "one gives none"])
def test_i12_data_cursors_in_any_order(cursors: tuple[str, ...]) -> None:
    exhausted(World(Rules(boundaries=1, cursors=cursors)))
    exhausted(World(Rules(members=1, ranks=2, boundaries=2, cursors=cursors)))


@pytest.mark.parametrize("fault", FAULTS)
def test_i3_i7_one_fault_at_any_moment(fault: Fault) -> None:
    rules = Rules(members=1, ranks=2, boundaries=1, faults=(fault,), fault_count=1)
    exhausted(World(rules))


@pytest.mark.parametrize(
    ("least", "fault"),
    [(1, "fail"), (1, "stuck"), (1, "crash"), (2, "rank"), (2, "stuck"), (2, "crash")],
)
def test_i7_what_the_others_still_save_when_a_leaver_that_has_saved_is_out_of_time(
    least: int, fault: Fault
) -> None:
    world = World(Rules(boundaries=1, least=least, hurry=2, faults=(fault,), fault_count=1))
    exhausted(world, after(world, *OUT_OF_TIME))


@pytest.mark.parametrize("block", [1, 2])
def test_i3_i7_loops_that_are_left_and_entered_again_in_any_order(block: int) -> None:
    rules = Rules(members=1, ranks=2, boundaries=3, block=block, hurry=1)
    exhausted(World(rules))


MANY = [
    Rules(boundaries=4, notices=(0, 1), least=2, fault_count=2, hurry=3),
    Rules(boundaries=4, notices=(0, 1), fault_count=2, hurry=3, cancels=2, lockstep=False),
    Rules(boundaries=4, notices=(0, 1), least=2, hurry=3, policy=COMMIT_BELOW_MIN),
    Rules(boundaries=3, joiners=1, notices=(), hurry=2, fault_count=1, stride=2),
    Rules(boundaries=3, joiners=2, least=2, notices=(1,), hurry=2, fault_count=2),
    Rules(boundaries=3, joiners=1, least=2, most=2, hurry=2, fault_count=1),
    Rules(
        members=3, joiners=1, ranks=2, least=2, notices=(0, 1), hurry=3, fault_count=3, cancels=1
    ),
    Rules(members=3, boundaries=2, outsider=1, joiners=1, fault_count=2, hurry=2),
    Rules(
        members=5, most=6, notices=(0, 1, 4), least=3, fault_count=4, hurry=3, stride=4, cancels=1
    ),
    Rules(begun=False, boundaries=2, notices=(0, 1), fault_count=2, hurry=2, joiners=1),
    Rules(members=3, deadlines=False, notices=(0, 1), least=2, joiners=1, fault_count=1, hurry=2),
    Rules(members=3, ranks=2, notices=(0, 1), fault_count=2, hurry=4, faults=(*FAULTS, "stuck")),
    Rules(boundaries=4, block=2, notices=(0, 1), cancels=1, fault_count=1, hurry=2),
    Rules(boundaries=4, block=1, joiners=1, least=2, notices=(1,), fault_count=1, hurry=2),
    Rules(boundaries=4, block=2, joiners=1, notices=(), hurry=2, lockstep=False),
    Rules(boundaries=3, block=1, joiners=1, fault_count=2, hurry=2, faults=(*FAULTS, "stay")),
    Rules(boundaries=3, outsider=1, least=2, notices=(0, 1), cancels=1, joiners=1, hurry=2),
    Rules(members=3, least=3, notices=(0, 1), preempted=(0,), cancels=1, fault_count=1, hurry=2),
]


THOUSANDS = pytest.param(
    range(1000, 5000), marks=[pytest.mark.long, pytest.mark.timeout(3600)], id="thousands"
)


@pytest.mark.parametrize("seeds", [pytest.param(range(60), id="daily"), THOUSANDS])
@pytest.mark.parametrize("rules", MANY, ids=range(len(MANY)))
def test_i2_i3_i7_i10_many_things_at_once_in_random_orders(rules: Rules, seeds: range) -> None:
    world = World(rules)
    assert all(walk(world, Random(seed)) > 10 for seed in seeds)


def test_i3_boundaries_that_differ_lose_no_more_than_the_save() -> None:
    world = World(Rules(strides=(1, 2), boundaries=6, lockstep=False))
    assert all(walk(world, Random(seed)) > 10 for seed in range(200))


def test_nobody_waits_for_ever_an_end_is_in_reach_from_everywhere() -> None:
    rules = Rules(members=1, boundaries=1, fault_count=1, cancels=1)
    assert states_without_an_end(World(rules), 200_000) == []


# --- the long part ---


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stride", [1, 2, 4])
def test_i3_i7_one_drain_exhausted(stride: int) -> None:
    assert explore(World(Rules(boundaries=2, stride=stride)), 10_000_000).exhausted


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", FAULTS)
def test_i3_i7_one_drain_and_one_fault_of_each_kind(fault: Fault) -> None:
    rules = Rules(boundaries=1, faults=(fault,), fault_count=1)
    assert explore(World(rules), 3_000_000).states > 100_000


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "rules",
    [
        Rules(boundaries=1, notices=(0, 1)),
        Rules(boundaries=1, notices=(0, 1), least=2),
        Rules(boundaries=1, joiners=1),
        Rules(boundaries=1, joiners=1, least=2),
        Rules(boundaries=1, cancels=1),
        Rules(boundaries=1, begun=False),
    ],
    ids=["two drains", "two drains below min", "join", "replacement", "cancel", "start"],
)
def test_i2_i3_i7_i10_more_as_far_as_it_goes(rules: Rules) -> None:
    assert explore(World(rules), 3_000_000).states > 100_000


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_nobody_waits_for_ever_with_two_pods() -> None:
    assert states_without_an_end(World(Rules(boundaries=2)), 400_000) == []
