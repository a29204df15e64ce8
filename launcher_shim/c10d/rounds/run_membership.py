# SPDX-License-Identifier: Apache-2.0
"""The membership as one round depends on it: who may be in it, who leaves, whether it must end."""

from __future__ import annotations

from launcher_shim.c10d.rounds.inputs import Membership
from rdzv.drain.decision import ends_round, granted, joins_wait
from rdzv.listing import decide
from rdzv.snapshot import Snapshot


def run_membership(
    snapshot: Snapshot,
    run_id: str,
    number: int,
    fenced: str | None = None,
    saved: frozenset[str] = frozenset(),
) -> Membership:
    """Look at ``snapshot`` from round ``number`` of ``run_id``; a function of these alone.

    ``fenced``: this sidecar's own name, where another pod has taken it over. ``saved``: as in
    ``Membership``; votes tell that, which are not part of a snapshot.
    """
    listing = decide(snapshot)
    kept_out = (snapshot.members[name] for name in listing.quarantined & listing.excluded.keys())
    fit = sorted([*listing.listed, *listing.standby, *kept_out], key=lambda one: one.age_order)
    drains = [drain for drain in snapshot.drains.values() if snapshot.has_name(drain)]
    leaving = {drain.member for drain in drains}
    if fenced is not None:
        leaving.add(fenced)
    return Membership(
        listed=frozenset(member.name for member in fit),
        leaving=frozenset(leaving),
        granted=frozenset(drain.member for drain in drains if granted(snapshot.commit, drain)),
        joins_wait=joins_wait(snapshot, listing, run_id, number),
        ends_round=ends_round(snapshot, run_id, number),
        saved=saved,
        ages={member.name: age for age, member in enumerate(fit)},
        quarantined=listing.quarantined,
    )
