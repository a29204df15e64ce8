# SPDX-License-Identifier: Apache-2.0
"""The decision whether a suspected member is evicted before its lease ends: pure.

One suspicion alone shows nothing: the path between two machines may be cut. Two by different
members that nobody suspects do, once the suspected one, and all that reach it, have had time to
take them back. So whoever reaches the store is not evicted, nor anybody while the store is away.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from rdzv.dataclass import dataclass
from rdzv.peers.ring import MEMBERS_MIN
from rdzv.records.job import Member
from rdzv.records.suspicion import Suspicion
from rdzv.snapshot import Snapshot

VETO_S = 1.0
"""Time for which a suspicion must stand before it evicts, counted by who reads it. A write by the
suspected member must fit in. Every loss that is seen early takes this much longer."""

VOTES = 2
"""Members that must suspect one."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """A member that is to be evicted, and the suspicions that this rests on."""

    member: Member
    votes: tuple[Suspicion, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class PeerDecision:
    """The members to evict. ``wake_at_s``: the time at which that may change by time alone."""

    evictions: tuple[Eviction, ...] = ()
    wake_at_s: float = math.inf


def in_force(snapshot: Snapshot, suspicions: Iterable[Suspicion]) -> list[Suspicion]:
    """Return the suspicions of present incarnations, by members that are still registered."""
    members = snapshot.members
    return [
        one
        for one in suspicions
        if (suspected := members.get(one.member)) is not None
        and suspected.incarnation == one.incarnation
        and (by := members.get(one.by)) is not None
        and by.lease == one.lease
        and one.by != one.member
    ]


def is_vote(one: Suspicion, suspected: Collection[str], failed: Collection[str]) -> bool:
    """Return whether a suspicion counts: nobody suspects its member, and the sign suffices.

    A sidecar may be away while its ranks train on, so a refused connection counts only for a member
    whose world has lost nodes already, so that it waits for the rest (``failed``).
    """
    return one.by not in suspected and (one.sign == "silent" or one.member in failed)


def decide(
    now: float,
    snapshot: Snapshot,
    suspicions: Iterable[Suspicion],
    since_s: Mapping[tuple[str, int], float],
    failed: frozenset[str],
    worlds: Mapping[str, frozenset[str]],
) -> PeerDecision:
    """Decide whom to evict.

    ``since_s``: since when each incarnation of a member has been suspected, on the clock of
    ``now``. ``failed``: as in ``is_vote``. ``worlds``: the members of each member's world, if it is
    in one. A world that is cut off as a whole trains on, and is kept: one vote must come from it.
    """
    if len(snapshot.members) < MEMBERS_MIN:
        return PeerDecision()
    present = in_force(snapshot, suspicions)
    suspected = {one.member for one in present}
    evictions, wake_at_s = [], math.inf
    for name in sorted(suspected):
        member = snapshot.members[name]
        votes = tuple(
            one for one in present if one.member == name and is_vote(one, suspected, failed)
        )
        world = worlds.get(name)
        if len(votes) < VOTES or not (world is None or any(one.by in world for one in votes)):
            continue
        due_s = since_s.get((name, member.incarnation), now) + VETO_S
        if now < due_s:
            wake_at_s = min(wake_at_s, due_s)
            continue
        evictions.append(Eviction(member, votes, _reason(votes)))
    return PeerDecision(tuple(evictions), wake_at_s)


def _reason(votes: tuple[Suspicion, ...]) -> str:
    by = " and ".join(sorted(one.by for one in votes)[:VOTES])
    silent = any(one.sign == "silent" for one in votes)
    what = "nothing answers there" if silent else "its sidecar is gone, and its world has failed"
    return f"{by} have lost their connections to it, and {what}"
