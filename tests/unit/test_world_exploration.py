# SPDX-License-Identifier: Apache-2.0
"""Every order in which the sends of a change in place can come, with a fault at each of them.

Checked at each step: no number of a world is tried twice; a step is made only in the world that has
formed, by ranks with one state (I13); none is lost; no pod is sent away before the others have said
to have its state (I7). And wherever it ends, all that live train in one world, or all start again.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.models.explorer import explore, first_broken
from tests.support.models.world_mutations import MUTATIONS, mutated
from tests.support.models.worlds import Worlds

STATES = 60_000

CASES: dict[str, Worlds] = {
    "first-world": Worlds(begins=True, steps=1),
    "join": Worlds(("join",), steps=1),
    "drain": Worlds(("drain a",)),
    "drain-cancelled": Worlds(("drain a", "cancel a"), steps=1),
    "two-drains": Worlds(("drain a", "drain b"), steps=1),
    "crash": Worlds(("crash",)),
    "two-crashes": Worlds(("crash", "crash"), pods=3),
    "crash-and-drain": Worlds(("crash", "drain a")),
    "worker-dies": Worlds(("worker",)),
    "cut": Worlds(("cut",)),
    "collective-fails": Worlds(("glitch",)),
    "collective-fails-and-pause": Worlds(("glitch", "pause")),
    "collective-fails-and-last-drain": Worlds(("glitch", "drain a"), pods=1),
    "half-a-step": Worlds(("half",)),
    "sidecar-restarts-in-a-drain": Worlds(("restart", "drain a"), steps=1),
    "sidecar-restarts-in-a-loss": Worlds(("restart", "crash")),
    "store-away-in-a-drain": Worlds(("away", "drain a")),
    "store-away-in-a-loss": Worlds(("away", "crash")),
    "timeout": Worlds(("late", "drain a"), steps=1),
    "drain-at-min": Worlds(("drain a",), least=2),
}

LARGE: dict[str, Worlds] = {
    "join-and-steps": Worlds(("join",), steps=4),
    "join-and-drain": Worlds(("join", "drain a")),
    "join-at-min-and-drain": Worlds(("join", "drain a"), least=2),
    "join-and-crash": Worlds(("join", "crash")),
    "join-and-cut": Worlds(("join", "cut"), pods=1),
    "newcomer-leaves-and-stays": Worlds(("join", "drain c", "cancel c")),
    "two-drains-of-three": Worlds(("drain a", "drain b", "restart"), pods=3),
    "everything": Worlds(("join", "drain a", "crash", "restart", "away", "late")),
    "everything-of-three": Worlds(("drain a", "worker", "cut", "half", "restart", "late"), pods=3),
}


@pytest.mark.parametrize("case", CASES)
def test_i13_each_order_of_a_change(case: str) -> None:
    explored = explore(CASES[case], STATES)
    assert explored.exhausted
    assert explored.ends > 0


@pytest.mark.parametrize("case", LARGE)
def test_i13_many_orders_of_several_changes(case: str) -> None:
    assert first_broken(LARGE[case], range(100)) == ""


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_planted_mistakes_are_found(name: str) -> None:
    mutation = MUTATIONS[name]
    model = {**CASES, **LARGE}[mutation.case]
    with mutated(name):
        broken = first_broken(type(model)(**_fields(model)), range(2000))
    assert mutation.found in broken, broken


def _fields(model: Worlds) -> dict[str, Any]:
    names = ("faults", "pods", "steps", "begins", "least")
    return {name: getattr(model, name) for name in names}
