# SPDX-License-Identifier: Apache-2.0
"""Members that watch each other's machines: who watches whom, and who is evicted early.

One suspicion alone shows nothing: the path between two machines may be cut. Two by different
members that nobody suspects do, once the suspected one, and all that reach it, have had time to
take them back. So whoever reaches the store is not evicted, nor anybody while the store is away.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, Self

from rdzv.dataclass import dataclass
from rdzv.keys import last_name
from rdzv.records.codec import Name, decode_record, encode
from rdzv.records.job import Member
from rdzv.snapshot import Snapshot
from rdzv.store import KeyValue

WATCHED = 3
"""Members that each one watches. Fewer: a machine that fails with several pods is watched by too
few others. More: idle connections."""

MEMBERS_MIN = 3
"""Members of a job that watches: of two, each may be the one that is cut off."""

VETO_S = 1.0
"""Time for which a suspicion must stand before it evicts, counted by who reads it. A write by the
suspected member must fit in. Every loss that is seen early takes this much longer."""

VOTES = 2
"""Members that must suspect one."""


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


Sign = Literal["silent", "refused"]
"""The sign of the loss. ``silent``: nothing answers there any more, the kernel included.
``refused``: the machine answers that no sidecar listens."""


@dataclass(frozen=True, slots=True)
class Unreached:
    """The neighbours that a member never reached: the loss of their machines is seen late.

    It hangs on the member's lease, and is there only while there are such neighbours.
    """

    members: tuple[str, ...]

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return encode(self)

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        return decode_record(cls, kv)


@dataclass(frozen=True, slots=True)
class Suspicion:
    """One suspicion; ``lease``, ``key`` and ``mod_revision`` are those of its record.

    A suspicion hangs on the lease of the member that suspects, and names the incarnation that
    it suspects. No snapshot has it, so that it wakes no other reader.
    """

    by: str
    member: Name
    incarnation: int
    sign: Sign
    key: str = ""
    lease: int = 0
    mod_revision: int = 0

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return encode(self, without=("by", "key"))

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        return decode_record(cls, kv, by=last_name(kv.key), key=kv.key)


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


def decide_evictions(
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
        evictions.append(Eviction(member, votes, _reason_of(votes)))
    return PeerDecision(tuple(evictions), wake_at_s)


def _reason_of(votes: tuple[Suspicion, ...]) -> str:
    by = " and ".join(sorted(one.by for one in votes)[:VOTES])
    silent = any(one.sign == "silent" for one in votes)
    what = "nothing answers there" if silent else "its sidecar is gone, and its world has failed"
    return f"{by} have lost their connections to it, and {what}"
