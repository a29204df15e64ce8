# SPDX-License-Identifier: Apache-2.0
"""Backoff, with jitter, between two attempts to register: pure.

A thousand sidecars may meet the same slow store. Retries without a backoff make it slower for all;
retries without jitter arrive together.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from rdzv.dataclass import dataclass
from rdzv.store.backoff import Doubling

FIRST_PAUSE_S = 0.3

BRIEF_IS_STRANGE = 2
"""Warn from this number of registrations in a row that were lost early. One may be chance."""


@dataclass(frozen=True, slots=True)
class Pacing:
    """The failures, and the registrations that were lost early, in a row."""

    lease_ttl_s: float
    """TTL of the member's lease, in seconds, the bound of the backoff. A longer one: a member is
    back later after a long outage, and fewer attempts reach the store meanwhile."""
    failures: int = 0
    """Attempts that wrote nothing, since the last one that did."""
    brief: int = 0
    """Registrations in a row that were not kept for a lease TTL."""
    since_s: float = 0.0
    """The time at which the first of these was written, or the present one if there is none, in
    seconds."""

    def after_failure(self) -> Pacing:
        """Return the pacing after an attempt that wrote nothing."""
        return replace(self, failures=self.failures + 1)

    def after_registering(self, now_s: float) -> Pacing:
        """Return the pacing after a registration was written."""
        return replace(self, failures=0, since_s=self.since_s if self.brief else now_s)

    def after_loss(self, kept_s: float) -> Pacing:
        """Return the pacing after the loss of a registration that was last renewed at ``kept_s``.

        That is counted up to the last renewal, not up to the end of the lease: a lease that is
        never renewed also lasts for its TTL, and an overloaded store has many of them.
        """
        return replace(self, brief=0 if kept_s >= self.lease_ttl_s else self.brief + 1)

    def pause_s(self, random: Random) -> float:
        """Draw the backoff before the next attempt, in seconds: it doubles, up to one lease TTL."""
        pause = Doubling(FIRST_PAUSE_S, self.lease_ttl_s)
        return pause.drawn_after(max(self.failures, self.brief), random)

    def complaint(self, now_s: float) -> str | None:
        """Return a sentence for the operator if registrations do not last, or None."""
        if self.brief < BRIEF_IS_STRANGE:
            return None
        return (
            f"registered {self.brief} times within {now_s - self.since_s:.1f} s: is another sidecar"
            " running under the same pod UID, or is the store too slow for leases of"
            f" {self.lease_ttl_s:g} s? see"
            " docs/operations.md#a-member-registers-again-and-again"
        )
