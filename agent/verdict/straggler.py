# SPDX-License-Identifier: Apache-2.0
"""The ranks that the others of a world wait for at each step, and what they cost: pure.

Ranks leave a step together. So the time that a rank does not wait for others is its own, and the
rank that waits least makes the step as long as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rdzv.dataclass import dataclass
from rdzv.records.progress import PodSaves

ALIKE = 0.1
"""Difference of two shares of waiting up to which two ranks are as slow as each other."""

WORTH = 0.2
"""Cost from which on stragglers are worth a sentence: less is in the noise of small steps."""

NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class Straggler:
    """The slowest ranks of a world, each with its pod: at most half of all.

    ``waits``: the least share of waiting among them; ``others``: that of all others.
    """

    ranks: tuple[tuple[str, int], ...]
    waits: float
    others: float

    @property
    def cost(self) -> float:
        """The share of each step by which it would be shorter without them."""
        return self.others - self.waits

    @property
    def sentence(self) -> str:
        """Their names and their cost."""
        named = ", ".join(f"rank {rank} ({pod})" for pod, rank in self.ranks[:NAMED_MAX])
        if len(self.ranks) > NAMED_MAX:
            named += f" and {len(self.ranks) - NAMED_MAX} more"
        return (
            f"all others wait for {named}: at least {self.others:.0%} of each step, and a step"
            f" would take {self.cost:.0%} less without"
        )


def waits_of(told: Sequence[PodSaves]) -> Mapping[str, float]:
    """Return the share of waiting of each pod whose ranks report it: that of its slowest rank."""
    return {one.member: min(one.waits) for one in told if one.waits}


def straggler(members: Sequence[str], told: Sequence[PodSaves]) -> Straggler | None:
    """Return the ranks that hold the world of ``members`` up; None if none do, or one is unknown.

    ``told``: what the pods report.
    """
    known = [one for one in told if one.waits]
    if not members or {one.member for one in known} != {*members}:
        return None
    shares = sorted(
        (share, one.member, rank)
        for one in known
        for rank, share in zip(one.ranks, one.waits, strict=True)
    )
    least = shares[0][0]
    slow = [one for one in shares if one[0] <= least + ALIKE]
    rest = shares[len(slow) :]
    if len(slow) > len(rest) or not rest or rest[0][0] - least < WORTH:
        return None
    return Straggler(tuple((pod, rank) for _, pod, rank in slow), least, rest[0][0])
