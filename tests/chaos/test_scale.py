# SPDX-License-Identifier: Apache-2.0
"""Many registrars and watchers on one real etcd join at once, rest, leave in part, and return.

Times depend on the machine and stand in docs/scale.md. What is held here are the counts: nobody
registers twice, nobody reads for each event, and the changes of a storm are looked at together.
"""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.scale import Phase, grow_and_shrink
from rdzv.registrar import RENEWALS_PER_TTL
from tests.chaos.etcd_cluster import find_etcd

pytestmark = pytest.mark.etcd

EVERYDAY = (60, 2, 5.0)
LONG = (300, 4, 20.0)
"""Sidecars, processes, seconds at rest: longer than from one renewal of a lease to the next. 1,000
are ``scripts/bench scale``."""
LEASE_TTL_S = 10.0


@pytest.mark.parametrize(
    ("sidecars", "processes", "rest_s"),
    [
        EVERYDAY,
        pytest.param(*LONG, marks=[pytest.mark.long, pytest.mark.timeout(600)]),
    ],
)
async def test_many_join_rest_leave_and_return(
    monkeypatch: pytest.MonkeyPatch, sidecars: int, processes: int, rest_s: float
) -> None:
    folder = (await asyncio.to_thread(find_etcd)).parent
    monkeypatch.setenv("MUSTER_TEST_ETCD", str(folder))
    async with asyncio.timeout(500):
        phases = [
            phase
            async for phase in grow_and_shrink(sidecars, processes, rest_s, sidecars, LEASE_TTL_S)
        ]
    join, rest, leave, again = phases
    third = len(range(0, sidecars, 3))
    story = "\n".join(phase.line() for phase in phases)

    # Each wrote its registration or its departure once: no lease was lost, however busy all were.
    for phase, due in zip(phases, (sidecars, 0, third, third), strict=True):
        sure, doubtful = phase.counts["writes"], phase.counts["writes in doubt"]
        assert sure <= due <= sure + doubtful, story
    # The first member writes the job; all others have planned on there being none.
    assert join.counts["writes that lost"] < sidecars, story

    # A read each when it starts; none for any event.
    assert join.counts["reads"] <= 2 * sidecars, story
    assert rest.counts["reads"] == 0, story
    assert leave.counts["reads"] <= 2 * third, story
    assert again.counts["reads"] <= 2 * third, story

    # What nobody can save: each change reaches each watcher. What can be saved is done together.
    for phase in (join, leave, again):
        assert phase.counts["lists made"] < phase.counts["events"] / 2, story
    assert rest.counts["lists made"] == 0, story
    renewals = rest_s * sidecars * RENEWALS_PER_TTL / LEASE_TTL_S
    assert 0 < rest.counts["renewals"] <= 1.5 * renewals + sidecars, story
    assert memory_is_bounded(join, again), story


def memory_is_bounded(join: Phase, again: Phase) -> bool:
    """Whether a third that came back costs no more than a third that was not there before."""
    return again.sidecars_rss_mib < 1.6 * join.sidecars_rss_mib + 20
