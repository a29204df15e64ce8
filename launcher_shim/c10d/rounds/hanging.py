# SPDX-License-Identifier: Apache-2.0
"""The decision on whether the torchrun of a pod hangs, so that the others go on without it. Pure.

Only the sidecar that serves a silent torchrun can tell: it alone sees its requests. A torchrun that
is given up and goes on after all is in no world: it asks for the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher_shim.c10d.rounds.inputs import RoundPolicy


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs of life of one torchrun; times are of its sidecar's monotonic clock, in seconds."""

    seen_s: float
    """Time of its last request, or of the answer to it."""
    pending: bool = False
    """Whether a request waits for its answer."""
    stays: bool = False
    """Whether it has not left a world that must form again, for too long (``Standing``)."""


@dataclass(frozen=True, slots=True)
class HangDecision:
    """The decision on whether a torchrun hangs."""

    hangs: bool = False
    reason: str = ""
    """One sentence; empty if it does not hang."""
    wake_at_s: float = math.inf
    """The time at which the decision may change by time alone."""


def decide(now: float, signs: Signs, policy: RoundPolicy) -> HangDecision:
    """Decide whether a torchrun that has not left hangs."""
    silent_s = now - signs.seen_s
    if not signs.pending and silent_s >= policy.hung_s:
        return HangDecision(True, f"it has sent no request for {silent_s:.0f} s")
    if signs.stays:
        # Its keep-alive thread goes on asking while its main thread waits for workers that do not
        # end.
        return HangDecision(True, f"it has not left its lost world for {policy.leave_s:.0f} s")
    return HangDecision(wake_at_s=(now if signs.pending else signs.seen_s) + policy.hung_s)
