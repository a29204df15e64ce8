# SPDX-License-Identifier: Apache-2.0
"""The start of a world, from its completion to the first step boundary of its ranks: pure.

A start may take minutes, and a world that is replaced in it has made nothing. So newcomers wait for
the first boundary. The sidecar of rank 0 writes to the round key what it sees of its ranks: as a
rank makes its first step together with all others, it speaks for the world.
"""

from __future__ import annotations

import math
from dataclasses import replace

from launcher_shim.c10d.rounds.records import Round
from rdzv.dataclass import dataclass

START_MAX_S = 600.0
"""The longest start that newcomers wait for, in seconds. Shorter: a world that takes longer makes
no step while nodes keep coming. Longer: newcomers idle beside ranks that never report a step."""

NO_STEP = -1
"""The step of ranks that have come to no boundary yet."""


@dataclass(frozen=True, slots=True)
class RanksSeen:
    """Reports of the ranks of this pod in one round; times are monotonic, in seconds."""

    round: int
    step: int = NO_STEP
    """Their newest boundary."""
    began_s: float = math.inf
    """The time at which the first boundary was seen."""
    stepped_s: float = -math.inf
    """The time at which the newest one was first seen."""

    def at(self, now: float, number: int, step: int) -> RanksSeen:
        """Return what is known once they have reported ``step`` in round ``number``."""
        before = self if self.round == number else RanksSeen(number)
        if step == before.step:
            return before
        return replace(before, step=step, began_s=min(before.began_s, now), stepped_s=now)


def noted(
    now: float, current: Round, ranks: RanksSeen | None, formed_s: float, *, saw_it_form: bool
) -> Round | None:
    """Return the round with what the ranks of rank 0's pod report; None if that is no news.

    ``formed_s``: the time since which the round is known to be complete. ``saw_it_form``: whether
    it became complete then.
    """
    if not current.complete or current.is_ending:
        return None
    if ranks is None or ranks.round != current.number:
        return None
    if ranks.step > NO_STEP:
        took_s = min(ranks.began_s - formed_s, START_MAX_S) if saw_it_form else current.start_s
        begun = replace(current, progress="steps", start_s=round(max(took_s, 0.0), 1))
        return None if current.progress == "steps" else begun
    if not current.progress:
        return replace(current, progress="loads")
    if current.progress == "loads" and now >= formed_s + START_MAX_S:
        # Its start has taken at least that long, if its ranks ever report: so may the next one.
        return replace(current, progress="mute", start_s=START_MAX_S)
    return None


def joins_from_s(current: Round, formed_s: float) -> float:
    """Return the time from which this complete round may end for newcomers."""
    if current.progress == "steps":
        return formed_s
    return formed_s + (START_MAX_S if current.progress == "loads" else current.start_s)
