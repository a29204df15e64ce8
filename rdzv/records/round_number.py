# SPDX-License-Identifier: Apache-2.0
"""Numbers of rounds: unique over all lives of a job in the store; people read them from 0."""

from __future__ import annotations

ROUNDS_PER_LIFE = 1_000_000
"""Distance between the first round numbers of two generations: more rounds than one ever has."""


def shown_round(number: int) -> int:
    """Return the number of a round in its generation: the first one is 0."""
    return number % ROUNDS_PER_LIFE
