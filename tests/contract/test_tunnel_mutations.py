# SPDX-License-Identifier: Apache-2.0
"""The tunnel's rules hold, and none can be left out unnoticed."""

from __future__ import annotations

import pytest

from tests.support.models.tunnel import SCENARIOS, run
from tests.support.models.tunnel_mutations import MUTATIONS, Mutation


@pytest.fixture(autouse=True)
def _no_blocking_call() -> None:
    """The agent is a program of its own, which may wait for the disk in its event loop."""


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_i8_a_rule_of_the_tunnel_holds(scenario: str) -> None:
    run(scenario)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.rule)
def test_i8_a_rule_that_is_left_out_is_found(mutation: Mutation) -> None:
    with mutation.plant(), pytest.raises(AssertionError):
        run(mutation.scenario)
