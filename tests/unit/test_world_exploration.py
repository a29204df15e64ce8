# SPDX-License-Identifier: Apache-2.0
"""Every order in which the sends of a change in place can come, with a crash at each of them.

Checked at each step: no number of a world is tried twice; a step is made only in a world that has
formed, by ranks with one state; none is lost; no pod is sent away before the others have its state.
And wherever it ends, all that live train in one world, or changes need a restart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rdzv.world.decision import WorldDecision, WorldSnapshot
from tests.support.models.explorer import explore, first_broken
from tests.support.models.worlds import Worlds

STATES = 3000
SEEDS = range(40)


def test_two_pods_form_their_first_world_and_train_in_any_order() -> None:
    explored = explore(Worlds(joins=False), STATES)
    assert explored.exhausted
    assert explored.ends > 0


@pytest.mark.parametrize(
    "model",
    [
        Worlds(),
        Worlds(drains=1),
        Worlds(faults=1),
        Worlds(faults=1, drains=1),
        Worlds(faults=2, three=True),
    ],
    ids=["join", "drain", "crash", "crash-and-drain", "two-crashes"],
)
def test_i13_a_step_counts_only_in_a_world_that_formed_with_one_state(model: Worlds) -> None:
    assert explore(model, STATES).states > 0
    assert first_broken(model, SEEDS) == ""


def same_number(decision: WorldDecision, snapshot: WorldSnapshot) -> WorldDecision:
    """The number of an attempt that has failed is tried again."""
    change = decision.change
    if decision.action != "form" or change is None or snapshot.change.phase != "broken":
        return decision
    return replace(decision, change=replace(change, number=snapshot.change.number))


def lowest_step(decision: WorldDecision, snapshot: WorldSnapshot) -> WorldDecision:
    """The state comes from the rank that is behind."""
    change = decision.change
    if decision.action != "form" or change is None:
        return decision
    known = [snapshot.reports[name] for name in change.seats if name in snapshot.members]
    behind = min((one for one in known if one.step >= 0), key=lambda one: one.step)
    return replace(decision, change=replace(change, step=behind.step, source=behind.member))


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ({"plant": same_number, "faults": 1}, "tried again"),
        ({"plant": lowest_step, "faults": 1, "three": True}, "is lost"),
        ({"boasts": True}, "which has formed"),
        ({"hurries": True, "drains": 1}, "sent away"),
        ({"believes": True}, "for nothing"),
    ],
    ids=["same-number", "lowest-step", "formed-before-the-state", "sigterm-early", "vote-too-low"],
)
def test_planted_mistakes_are_found(planted: dict[str, Any], found: str) -> None:
    broken = first_broken(Worlds(**planted), range(2000))
    assert found in broken, broken
