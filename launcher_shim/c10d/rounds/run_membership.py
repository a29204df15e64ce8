# SPDX-License-Identifier: Apache-2.0
"""The part of the membership that one round depends on: the members that may join, or leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from launcher_shim.c10d.rounds.inputs import RoundMembers
from launcher_shim.c10d.rounds.records import Round
from rdzv.drain.decision import ends_round, granted, join_agreed, joins_wait, savers
from rdzv.listing import Listing
from rdzv.membership import Membership as JobMembership
from rdzv.records.drain import Drain
from rdzv.records.failure import Failure
from rdzv.snapshot import Snapshot


def run_membership(
    snapshot: Snapshot,
    listing: Listing,
    run_id: str,
    current: Round,
    fenced: str | None = None,
    saved: frozenset[str] = frozenset(),
    failures: Mapping[str, Failure] | None = None,
) -> RoundMembers:
    """Return the part of ``snapshot`` that round ``current`` of ``run_id`` depends on: pure.

    ``listing`` is that of ``snapshot``. ``fenced``: this sidecar's member name if another pod has
    taken it over. ``saved``: as in ``RoundMembers``; computed from votes, which no snapshot has.
    ``failures``: the newest of each member; they count after failed starts alone.
    """
    kept_out = (snapshot.members[name] for name in listing.quarantined & listing.excluded.keys())
    fit = sorted([*listing.listed, *listing.standby, *kept_out], key=lambda one: one.age_order)
    drains = [
        drain
        for drain in snapshot.drains.values()
        if snapshot.has_name(drain) and not _is_of_backup(drain, current)
    ]
    leaving = {drain.member for drain in drains}
    if fenced is not None:
        leaving.add(fenced)
    return RoundMembers(
        listed=frozenset(member.name for member in fit),
        leaving=frozenset(leaving),
        granted=frozenset(drain.member for drain in drains if granted(snapshot.commit, drain)),
        joins_wait=joins_wait(snapshot, listing, run_id, current.number),
        join_agreed=join_agreed(snapshot.commit, run_id, current.number),
        ends_round=ends_round(snapshot, run_id, current.number),
        saved=saved,
        ages={member.name: age for age, member in enumerate(fit)},
        quarantined=listing.quarantined,
        locations={member.name: member.location for member in fit},
        blocks={member.name: member.block for member in fit if member.block},
        failed={
            name: one for name, one in (failures or {}).items() if _is_in_row(one, run_id, current)
        },
        job_revision=snapshot.job.mod_revision if snapshot.job and failures else 0,
    )


def _is_in_row(failure: Failure, run_id: str, current: Round) -> bool:
    """Return whether workers failed by themselves in a failed start right before ``current``."""
    row = range(current.number - current.failed_starts, current.number)
    return failure.run == run_id and failure.round in row and not failure.follows


def _is_of_backup(drain: Drain, current: Round) -> bool:
    """Return whether ``drain`` is a backup's, from before its member got a place in ``current``.

    A draining member gets no place. So it is the drain of an earlier pod, which has the name in the
    backup until the present pod has registered again.
    """
    return 0 < drain.created_revision <= current.restored_at and any(
        seat.member == drain.member for seat in current.frozen
    )


class MembershipOfRun:
    """A cache of ``run_membership`` for one run, valid until one of its inputs changes.

    ``fenced`` returns this sidecar's member name while another pod has taken it over, else None.
    """

    def __init__(
        self, membership: JobMembership, run_id: str, fenced: Callable[[], str | None]
    ) -> None:
        self._membership = membership
        self._run_id = run_id
        self._fenced = fenced
        self._cached: tuple[Snapshot, tuple[object, ...], RoundMembers] | None = None

    def at(self, current: Round) -> RoundMembers:
        """Return the membership that round ``current`` depends on."""
        snapshot, fenced, cached = self._membership.snapshot(), self._fenced(), self._cached
        saved = self._saved(snapshot, current.number)
        failures = self._membership.failures() if current.failed_starts else None
        others = (current, fenced, saved, failures)
        if cached is None or cached[0] is not snapshot or cached[1] != others:
            listing = self._membership.listing()
            made = run_membership(snapshot, listing, self._run_id, current, fenced, saved, failures)
            cached = self._cached = (snapshot, others, made)
        return cached[2]

    def _saved(self, snapshot: Snapshot, number: int) -> frozenset[str]:
        """Return the members that leave and have saved while others still save."""
        if not snapshot.drains or snapshot.commit is None or snapshot.commit.phase != "commit":
            return frozenset()
        votes = self._membership.votes()
        return frozenset(savers(snapshot, votes, self._run_id, number).values())
