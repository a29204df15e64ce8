# SPDX-License-Identifier: Apache-2.0
"""The members that are listed, in order, and the reason against each other one.

It is one pure function for both launchers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from rdzv.dataclass import dataclass
from rdzv.records.job import Member
from rdzv.records.sizes import Sizes
from rdzv.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Places:
    """The members that take part in a launcher's round, and those that ask to, by name.

    A launcher that never starts in its pod is in neither, however old its member is.
    """

    taken: frozenset[str] = frozenset()
    asking: frozenset[str] = frozenset()


NO_ROUND = Places()


@dataclass(frozen=True, slots=True)
class Listing:
    """The members that launchers may use now, at one store revision.

    ``listed`` and ``standby`` are ordered by age, oldest first, so that ranks move as little as
    possible; if a launcher says who takes part, those come first, then those that ask to.
    ``excluded`` has the reason against every other member. ``reason`` is one sentence.
    ``quarantined``: members whose torchrun dies again and again. They are excluded, unless too few
    would be listed without them for the smallest world.
    """

    revision: int
    listed: tuple[Member, ...] = ()
    standby: tuple[Member, ...] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)
    reason: str = "no member has registered yet"
    quarantined: frozenset[str] = frozenset()


def decide(snapshot: Snapshot, places: Places = NO_ROUND) -> Listing:
    """List the members of ``snapshot``; ``places`` says which of them have a place already."""
    rules = snapshot.rules
    if rules is None:
        return Listing(snapshot.revision)
    excluded: dict[str, str] = {}
    able: list[Member] = []
    out: dict[Member, str] = {}
    for member in sorted(snapshot.members.values(), key=lambda m: (_claim(m, places), m.age_order)):
        reason = _reason_against(member, snapshot)
        if reason is not None:
            excluded[member.name] = reason
        elif (quarantine := snapshot.quarantine_of(member)) is not None:
            out[member] = quarantine.sentence
        else:
            able.append(member)
    sizes = rules.sizes
    if len(able) < sizes.smallest:
        able += out
    else:
        excluded |= {member.name: reason for member, reason in out.items()}
    room = sizes.largest(len(able)) or sizes.most
    listed, standby = tuple(able[:room]), tuple(able[room:])
    return Listing(
        snapshot.revision,
        listed,
        standby,
        excluded,
        _sentence(sizes, listed, standby),
        frozenset(member.name for member in out),
    )


def first_to_go(listing: Listing) -> Member | None:
    """Return the member that scaling down takes first; None if their controller does not say.

    A StatefulSet, an Indexed Job and a PyTorchJob drop the highest index. A ReplicaSet numbers no
    pods, and drops one that is not ready before one that is.
    """
    able = [*listing.listed, *listing.standby]
    if len(able) < 2 or any(member.index < 0 for member in able):
        return None
    return max(able, key=lambda member: member.index)


def _claim(member: Member, places: Places) -> int:
    if member.name in places.taken:
        return 0
    return 1 if member.name in places.asking else 2


def _reason_against(member: Member, snapshot: Snapshot) -> str | None:
    """Return why ``member`` is not to be listed, or None."""
    assert snapshot.job is not None
    if member.role == "launcher":
        return "it is a launcher and has no slots"
    if (drain := snapshot.drains.get(member.pod_uid)) is not None:
        return f"it drains: {drain.reason}"
    if member.slots < 1:
        return "it has no slots"
    holder = snapshot.incarnations.get(member.name)
    if holder is not None and holder.number > member.incarnation:
        return f"incarnation {holder.number} of it has been given out"
    return None


def _sentence(sizes: Sizes, listed: tuple[Member, ...], standby: tuple[Member, ...]) -> str:
    text = f"{len(listed)} listed of {sizes}"
    if standby:
        text += f", {len(standby)} on standby"
    if len(listed) < sizes.smallest:
        least = "min" if sizes.smallest == sizes.least else f"{sizes.smallest}, the smallest size"
        text += f": {sizes.smallest - len(listed)} short of {least}"
    return text
