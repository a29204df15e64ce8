# SPDX-License-Identifier: Apache-2.0
"""Who leads: a pure function of the time and of the Lease as it was seen. Clocks are not compared.

The holder writes the Lease again and again. Whoever sees the same version of it for as long as it
is good takes it over, by a write that the API server refuses if another came first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LEASE_S = 15.0
"""For how long a holder that is silent keeps it. Shorter: an API server that stalls changes the
leader for nothing. Longer: nobody writes for so long after one has died."""
RENEW_S = 3.0
"""Between two looks at it, by the holder and by the others."""
GIVE_UP_S = 10.0
"""So long after its last renewal the holder stops: before anybody else may begin."""

Step = Literal["renew", "take", "wait"]


@dataclass(frozen=True, slots=True)
class Sighting:
    """The Lease at one version. ``seen_s``: since when it has been at that one, by our clock."""

    holder: str
    version: str
    seen_s: float


def after(before: Sighting | None, now: float, holder: str, version: str) -> Sighting:
    """Take in what was read at ``now``."""
    if before is not None and before.version == version:
        return before
    return Sighting(holder, version, now)


def decide(now: float, me: str, seen: Sighting) -> tuple[Step, str]:
    """Return what ``me`` does, and one sentence of reason."""
    if seen.holder == me:
        return "renew", "this replica is the leader"
    if not seen.holder:
        return "take", "there was no leader"
    if now - seen.seen_s >= LEASE_S:
        return "take", f"{seen.holder} has been silent for {LEASE_S:g} s"
    return "wait", f"{seen.holder} is the leader"
