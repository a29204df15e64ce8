# SPDX-License-Identifier: Apache-2.0
"""The decision on whether the torchrun of a pod hangs, so that the others go on without it. Pure.

Only the sidecar that serves the torchrun may decide it: it alone sees its requests and has made the
answers. A torchrun that is given up and goes on after all is in no world: it asks for the next.
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
    leave_shown_s: float | None = None
    """Time since which its view makes it leave a world that trains no more; None while it does
    not."""


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
    wake_at_s = (now if signs.pending else signs.seen_s) + policy.hung_s
    if signs.leave_shown_s is None:
        return HangDecision(wake_at_s=wake_at_s)
    # Its keep-alive thread goes on asking while its main thread waits for workers that do not end.
    shown_s = now - signs.leave_shown_s
    if shown_s >= policy.leave_s:
        return HangDecision(
            True, f"it was told to leave its world {shown_s:.0f} s ago and has not left it"
        )
    return HangDecision(wake_at_s=min(wake_at_s, signs.leave_shown_s + policy.leave_s))
