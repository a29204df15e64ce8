# SPDX-License-Identifier: Apache-2.0
"""Leader election: a pure function of the time and of the observed Lease. Clocks are not compared.

The holder renews the Lease periodically. A replica that has seen the same version of it for the
duration of the Lease takes it over, by a write that the API server refuses if another came first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LEASE_S = 15.0
"""Duration of the Lease without a renewal. Shorter: an API server that stalls changes the leader
needlessly. Longer: nobody writes for as long after the leader has died."""
RENEW_S = 3.0
"""Interval between two reads of the Lease, by the holder and by the others."""
GIVE_UP_S = 10.0
"""Time after its last renewal at which the holder stops: before another replica may begin."""

Step = Literal["renew", "take", "wait"]


@dataclass(frozen=True, slots=True)
class Sighting:
    """The Lease at one version. ``seen_s``: the time of its first read, by this replica's clock."""

    holder: str
    version: str
    seen_s: float


def after(before: Sighting | None, now: float, holder: str, version: str) -> Sighting:
    """Return the sighting after a read at ``now``: ``before`` if the version is the same."""
    if before is not None and before.version == version:
        return before
    return Sighting(holder, version, now)


def decide(now: float, me: str, seen: Sighting) -> tuple[Step, str]:
    """Decide the next step of ``me``; return it with its reason in one sentence."""
    if seen.holder == me:
        return "renew", "this replica is the leader"
    if not seen.holder:
        return "take", "there was no leader"
    if now - seen.seen_s >= LEASE_S:
        return "take", f"{seen.holder} has been silent for {LEASE_S:g} s"
    return "wait", f"{seen.holder} is the leader"
