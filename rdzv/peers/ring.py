# SPDX-License-Identifier: Apache-2.0
"""The ring of members that watch each other: each watches the next few of a stable order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rdzv.records.job import Member

WATCHED = 3
"""Members that each one watches. Fewer: a machine that fails with several pods is watched by too
few others. More: idle connections."""

MEMBERS_MIN = 3
"""Members of a job that watches: of two, each may be the one that is cut off."""


def ring(members: Mapping[str, Member]) -> list[str]:
    """Return the names of all members in the order of the ring.

    It depends on names and machines alone, so that all agree and a change moves few. The pods of
    one machine stand far from each other: they fail together.
    """
    on_machine: Counter[str] = Counter()
    places = []
    for name in sorted(members):
        machine = members[name].node
        places.append((on_machine[machine] if machine else 0, name))
        on_machine[machine] += 1
    return [name for _, name in sorted(places)]


def watched_by(me: str, members: Mapping[str, Member]) -> list[Member]:
    """Return the members that ``me`` watches; none in a job of two, or if it is no member."""
    return [one for one in _after(me, ring(members), members) if one.health_port]


def near(me: str, members: Mapping[str, Member]) -> set[str]:
    """Return the members that ``me`` watches or is watched by."""
    order = ring(members)
    found = (*_after(me, order, members), *_after(me, order[::-1], members))
    return {one.name for one in found}


def _after(me: str, order: list[str], members: Mapping[str, Member]) -> list[Member]:
    if me not in members or len(order) < MEMBERS_MIN:
        return []
    at = order.index(me)
    others = [*order[at + 1 :], *order[:at]]
    return [members[name] for name in others[:WATCHED]]
