# SPDX-License-Identifier: Apache-2.0
"""Tests of the exploration: with any one rule left out, it finds what goes wrong."""

from __future__ import annotations

import pytest

from tests.support.models.drain_mutations import PLANTED, Planted, nothing_ends_the_round
from tests.support.models.drains import Rules, World
from tests.support.models.explorer import Broken, after, explore, first_broken


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_i2_i3_i7_i10_a_rule_that_is_left_out_is_missed(planted: Planted) -> None:
    world = World(planted.rules, **planted.mutation)
    first = after(world, *planted.labels)
    assert planted.found in first_broken(world, range(4000), first)


def test_an_admission_that_does_not_end_the_round() -> None:
    rules = Rules(members=1, joiners=1, boundaries=1, notices=(), faults=("vanish",), fault_count=1)
    world = World(rules, ends_round=nothing_ends_the_round)
    with pytest.raises(Broken, match="waits for ever"):
        explore(world, 200_000)
