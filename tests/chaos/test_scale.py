# SPDX-License-Identifier: Apache-2.0
"""Many registrars and watchers on one real etcd join at once, rest, leave in part, and return.

Times depend on the machine and stand in docs/scale.md. What is held here are the counts: nobody
registers twice, nobody reads for each event, and the changes of a storm are looked at together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from benchmarks.scale import Phase, grow_and_shrink
from rdzv.members.lease import RENEWALS_PER_TTL
from rdzv.pacing import FIRST_PAUSE_S, Doubling
from tests.support.store.etcd_cluster import find_etcd

pytestmark = pytest.mark.etcd

EVERYDAY = (60, 2, 23.0, 60.0, ("--unsafe-no-fsync",))
LONG = (300, 4, 20.0, 60.0, ())
"""Sidecars, processes, seconds at rest: longer than from one renewal of a lease to the next; the
lease; etcd's own arguments. 1,000 are ``scripts/bench scale``."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("sidecars", "processes", "rest_s", "lease_ttl_s", "etcd_arguments"),
    [EVERYDAY, pytest.param(*LONG, marks=pytest.mark.long)],
)
async def test_many_join_rest_leave_and_return(
    monkeypatch: pytest.MonkeyPatch,
    sidecars: int,
    processes: int,
    rest_s: float,
    lease_ttl_s: float,
    etcd_arguments: Sequence[str],
) -> None:
    folder = (await asyncio.to_thread(find_etcd)).parent
    monkeypatch.setenv("MUSTER_TEST_ETCD", str(folder))
    grown = grow_and_shrink(sidecars, processes, rest_s, sidecars, lease_ttl_s, etcd_arguments)
    async with asyncio.timeout(500):
        phases = [phase async for phase in grown]
    join, rest, leave, again = phases
    third = len(range(0, sidecars, 3))
    story = "\n".join(phase.line() for phase in phases)

    # Each wrote its registration or its departure once: no lease was lost.
    for phase, due in zip(phases, (sidecars, 0, third, third), strict=True):
        sure, doubtful = phase.counts["writes"], phase.counts["writes in doubt"]
        assert sure <= due <= sure + doubtful, story
    # The first member writes the job; all others have planned on there being none, and do so again
    # only if the watch has not shown it within a pause.
    most = sidecars * losses_within(join.took_s, lease_ttl_s) + join.counts["writes in doubt"]
    assert join.counts["writes that lost"] <= most, story

    # A read each when it starts, and one for each write in doubt; none for any event.
    for phase, due in zip(phases, (2 * sidecars, 0, 2 * third, 2 * third), strict=True):
        assert phase.counts["reads"] <= due + phase.counts["writes in doubt"], story

    # What nobody can save: each change reaches each watcher. What can be saved is done together.
    for phase in (join, leave, again):
        assert phase.counts["lists made"] < phase.counts["events"] / 2, story
    assert rest.counts["lists made"] == 0, story
    renewals = rest.took_s * sidecars * RENEWALS_PER_TTL / lease_ttl_s
    assert 0 < rest.counts["renewals"] <= 1.5 * renewals + sidecars, story
    assert memory_is_bounded(join, again), story


def losses_within(took_s: float, lease_ttl_s: float) -> int:
    """How often one sidecar can lose in that time, with the shortest pause after each."""
    pauses = Doubling(FIRST_PAUSE_S, lease_ttl_s)
    losses = 1
    while (took_s := took_s - pauses.after(losses) / 2) >= 0:
        losses += 1
    return losses


def memory_is_bounded(join: Phase, again: Phase) -> bool:
    """Whether a third that came back costs no more than a third that was not there before."""
    return again.sidecars_rss_mib < 1.6 * join.sidecars_rss_mib + 20
