# SPDX-License-Identifier: Apache-2.0
"""What became of a job's steps between two moments: lost, trained twice, and how long all stood."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tests.support.training.step_log import step_lines

RECENT_S = 2.0
"""A job that has made a step so lately goes on, for all that nobody has watched it."""


@dataclass(frozen=True)
class Account:
    """What happened to a job within some time."""

    lost: int
    """Steps that were made, and then not there to go on from; and steps that nobody made."""
    twice: int
    """Steps that were made again by a later world."""
    still_s: float
    """The longest time in which no rank made a step."""
    went_on: bool
    """Whether it trained at the end."""


@dataclass
class _World:
    began_s: float
    steps: set[int] = field(default_factory=set)


def account(steps: Path, since_s: float, until_s: float, saved: int, *, watched: bool) -> Account:
    """Account for the step lines in a directory; moments are monotonic.

    ``saved``: the newest step on disk, which a job that stands could be started again from.
    ``watched``: the caller has seen the job go on, however long ago that is on a busy machine.
    """
    worlds: dict[int, _World] = {}
    moments = [since_s, until_s]
    for at_s, step, number in step_lines(steps):
        if at_s <= until_s:
            world = worlds.setdefault(number, _World(at_s))
            world.began_s = min(world.began_s, at_s)
            world.steps.add(step)
        if since_s <= at_s <= until_s:
            moments.append(at_s)
    lost = twice = 0
    made: set[int] = set()
    for world in sorted(worlds.values(), key=lambda world: world.began_s):
        if world.began_s > since_s:
            reached, first = max(made, default=0), min(world.steps)
            lost += abs(reached + 1 - first)
            twice += len(made & world.steps)
        made |= world.steps
    moments.sort()
    went_on = watched or until_s - moments[-2] < RECENT_S
    if not went_on:
        lost += max(0, max(made, default=0) - saved)
    return Account(lost, twice, max(b - a for a, b in pairwise(moments)), went_on)
