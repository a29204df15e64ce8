# SPDX-License-Identifier: Apache-2.0
"""The membership as one round depends on it: who may be in it, who leaves, whether it must end."""

from __future__ import annotations

from collections.abc import Callable

from launcher_shim.c10d.rounds.inputs import RoundMembers
from rdzv.drain.decision import ends_round, granted, joins_wait, savers
from rdzv.listing import Listing
from rdzv.membership import Membership as JobMembership
from rdzv.snapshot import Snapshot


def run_membership(
    snapshot: Snapshot,
    listing: Listing,
    run_id: str,
    number: int,
    fenced: str | None = None,
    saved: frozenset[str] = frozenset(),
) -> RoundMembers:
    """Look at ``snapshot`` from round ``number`` of ``run_id``; a function of these alone.

    ``listing`` is that of ``snapshot``. ``fenced``: this sidecar's own name, where another pod has
    taken it over. ``saved``: as in ``RoundMembers``; votes tell that, which are not part of a
    snapshot.
    """
    kept_out = (snapshot.members[name] for name in listing.quarantined & listing.excluded.keys())
    fit = sorted([*listing.listed, *listing.standby, *kept_out], key=lambda one: one.age_order)
    drains = [drain for drain in snapshot.drains.values() if snapshot.has_name(drain)]
    leaving = {drain.member for drain in drains}
    if fenced is not None:
        leaving.add(fenced)
    return RoundMembers(
        listed=frozenset(member.name for member in fit),
        leaving=frozenset(leaving),
        granted=frozenset(drain.member for drain in drains if granted(snapshot.commit, drain)),
        joins_wait=joins_wait(snapshot, listing, run_id, number),
        ends_round=ends_round(snapshot, run_id, number),
        saved=saved,
        ages={member.name: age for age, member in enumerate(fit)},
        quarantined=listing.quarantined,
    )


class MembershipOfRun:
    """The membership as one run depends on it; the same object for as long as nothing in it moved.

    ``fenced`` gives this sidecar's own name while another pod has taken it over, else None.
    """

    def __init__(
        self, membership: JobMembership, run_id: str, fenced: Callable[[], str | None]
    ) -> None:
        self._membership = membership
        self._run_id = run_id
        self._fenced = fenced
        self._known: tuple[Snapshot, int, str | None, frozenset[str], RoundMembers] | None = None

    def at(self, number: int) -> RoundMembers:
        """Look at it from round ``number``."""
        snapshot, fenced, known = self._membership.snapshot(), self._fenced(), self._known
        saved = self._saved(snapshot, number)
        if known is None or known[0] is not snapshot or known[1:4] != (number, fenced, saved):
            listing = self._membership.listing()
            made = run_membership(snapshot, listing, self._run_id, number, fenced, saved)
            known = self._known = (snapshot, number, fenced, saved, made)
        return known[4]

    def _saved(self, snapshot: Snapshot, number: int) -> frozenset[str]:
        """Who leaves and has saved while others still do; cheap while nobody saves."""
        if not snapshot.drains or snapshot.commit is None or snapshot.commit.phase != "commit":
            return frozenset()
        votes = self._membership.votes()
        return frozenset(savers(snapshot, votes, self._run_id, number).values())
