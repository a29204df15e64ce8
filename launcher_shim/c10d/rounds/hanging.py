# SPDX-License-Identifier: Apache-2.0
"""When the torchrun of a pod counts as hung, so that the others form a world without it. Pure.

Only the sidecar that serves it may say so: it alone hears what the torchrun asks, and knows what
that was told. One that is given up and goes on after all is in no world, and asks for the next one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher_shim.c10d.rounds.inputs import RoundPolicy


@dataclass(frozen=True, slots=True)
class Signs:
    """What was seen of one torchrun; times are of its sidecar's monotonic clock.

    ``seen_s``: when it asked for something, or was answered, last. ``pending``: whether it waits
    for an answer now. ``told_s``: since when it is told to leave a world that trains no more; None
    while it is not.
    """

    seen_s: float
    pending: bool = False
    leave_shown_s: float | None = None


@dataclass(frozen=True, slots=True)
class HangDecision:
    """``hangs``, and for which ``reason``: one sentence, empty while it does not.

    ``wake_at_s``: when time alone would change the answer.
    """

    hangs: bool = False
    reason: str = ""
    wake_at_s: float = math.inf


def decide(now: float, signs: Signs, policy: RoundPolicy) -> HangDecision:
    """Decide whether a torchrun that has not left hangs."""
    silent_s = now - signs.seen_s
    if not signs.pending and silent_s >= policy.hung_s:
        return HangDecision(True, f"it has asked for nothing for {silent_s:.0f} s")
    wake_at_s = (now if signs.pending else signs.seen_s) + policy.hung_s
    if signs.leave_shown_s is None:
        return HangDecision(wake_at_s=wake_at_s)
    # Its keep-alive thread asks on while its main thread waits for workers that do not end.
    shown_s = now - signs.leave_shown_s
    if shown_s >= policy.leave_s:
        return HangDecision(
            True, f"it was told {shown_s:.0f} s ago that its world is lost, and has not left it"
        )
    return HangDecision(wake_at_s=min(wake_at_s, signs.leave_shown_s + policy.leave_s))
