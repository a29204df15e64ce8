# SPDX-License-Identifier: Apache-2.0
"""The decision on whether the torchrun of a pod hangs, so that the others go on without it. Pure.

Only the sidecar that serves a silent torchrun can tell: it alone sees its requests. A torchrun that
is given up and goes on after all is in no world: it asks for the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from launcher_shim.c10d.rounds.inputs import RoundPolicy

WELL_S = 10.0
"""A rank that has come to a boundary this long after the last request of its torchrun trains on
without it. Longer than a request and a look at the ranks may take; shorter than ``hung_s``."""

ASK_S = 15.0
"""Time within which the save that is asked for must begin."""

Save = Literal["none", "asked", "agreed", "over"]
"""The state of the save before which a torchrun is not given up. ``none``: no save is asked for.
``agreed``: its ranks are held, or save. ``over``: they have saved, or the attempt has failed."""


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs of life of one torchrun; times are of its sidecar's monotonic clock, in seconds."""

    seen_s: float
    """Time of its last request, or of the answer to it."""
    pending: bool = False
    """Whether a request waits for its answer."""
    stays: bool = False
    """Whether it has not left a world that must form again, for too long (``Standing``)."""
    stepped_s: float = -math.inf
    """Time at which the newest boundary of its ranks was first seen, if its world trains on."""
    save: Save = "none"
    asked_s: float = math.inf
    """Time since which the save is asked for."""


@dataclass(frozen=True, slots=True)
class HangDecision:
    """The decision on whether a torchrun hangs."""

    hangs: bool = False
    reason: str = ""
    """One sentence; empty if it shows signs of life."""
    wake_at_s: float = math.inf
    """The time at which the decision may change by time alone."""
    saves_first: bool = False
    """Whether its world is to save before it is given up."""


def decide(now: float, signs: Signs, policy: RoundPolicy) -> HangDecision:
    """Decide whether a torchrun that has not left hangs."""
    silent_s = now - signs.seen_s
    if not signs.pending and silent_s >= policy.hung_s:
        return _silent(now, signs, f"it has sent no request for {silent_s:.0f} s")
    if signs.stays:
        # Its keep-alive thread goes on asking while its main thread waits for workers that do not
        # end.
        return HangDecision(True, f"it has not left its lost world for {policy.leave_s:.0f} s")
    return HangDecision(wake_at_s=(now if signs.pending else signs.seen_s) + policy.hung_s)


def _silent(now: float, signs: Signs, reason: str) -> HangDecision:
    """Decide on a torchrun that is silent: its ranks may be well, and are to save first."""
    if signs.save == "none" and signs.stepped_s >= signs.seen_s + WELL_S:
        return HangDecision(reason=reason, wake_at_s=now + ASK_S, saves_first=True)
    if signs.save == "asked" and now < signs.asked_s + ASK_S:
        return HangDecision(reason=reason, wake_at_s=signs.asked_s + ASK_S, saves_first=True)
    if signs.save == "agreed":
        return HangDecision(reason=reason, saves_first=True)
    return HangDecision(True, reason)
