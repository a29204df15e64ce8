# SPDX-License-Identifier: Apache-2.0
"""The decision on whether the torchrun of a pod hangs, so that the others go on without it. Pure.

Only the sidecar that serves a silent torchrun can tell: it alone sees its requests. A torchrun that
is given up and goes on after all is in no world: it asks for the next.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Literal

from launcher_shim.c10d.rounds.evaluation import Evaluation, Evaluator
from launcher_shim.c10d.rounds.inputs import RoundPolicy
from launcher_shim.c10d.rounds.place import Place
from launcher_shim.c10d.rounds.records import Seat
from rdzv.dataclass import dataclass

log = logging.getLogger(__name__)

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


class HangWatch:
    """The watch over the torchrun that holds ``place``."""

    def __init__(self, place: Place, evaluator: Evaluator) -> None:
        self._place = place
        self._evaluator = evaluator
        self._asked: tuple[Seat, float] | None = None
        self._agreed = False

    def leave_if_hung(self, evaluation: Evaluation, now: float) -> float:
        """Put a tombstone on the node of a torchrun that hangs; return when to check again."""
        claim = self._place.holder
        node = self._place.own_node(claim) if claim is not None else None
        if claim is None or node is None or node.state == "left":
            self._asked = None
            return math.inf
        stays = evaluation.standings.of.get(node.seat) == "hung"
        current, ranks = evaluation.snapshot.round, self._evaluator.ranks
        trains = current.is_world_of(node) and not node.finished and not current.finishing
        trains = trains and not current.is_ending and ranks.round == current.number
        signs = Signs(
            claim.seen_s,
            claim.pending > 0,
            stays,
            ranks.stepped_s if trains else -math.inf,
            self._save(evaluation, node.seat) if not current.is_ending else "over",
            self._asked[1] if self._asked else math.inf,
        )
        decision = decide(now, signs, self._evaluator.policy())
        if not decision.saves_first:
            self._asked, self._agreed = None, False
        elif self._asked is None:
            self._asked = node.seat, now
            log.warning("the torchrun here is silent, all ranks save first: %s", decision.reason)
        self._place.call_silent(claim, silent=decision.saves_first)
        if decision.hangs:
            log.warning("the torchrun here hangs: %s", decision.reason)
            self._place.leave(claim, "done" if node.finished else "hung")
        return decision.wake_at_s

    def _save(self, evaluation: Evaluation, seat: Seat) -> Save:
        """Return what has become of the save that this node asks for."""
        if self._asked is None or self._asked[0] != seat:
            return "none"
        members = evaluation.stored.membership
        # Granted, after a save or without one; or the attempt has failed.
        granted = members.ends_round or not members.joins_wait
        if granted or (self._agreed and not members.join_agreed):
            return "over"
        self._agreed = members.join_agreed
        return "agreed" if self._agreed else "asked"

    def excuse(self, now: float) -> None:
        """Count from ``now`` on, after a stop of this sidecar itself."""
        seen = self._evaluator.observations
        since_s = max(seen.ending_since_s, now)
        self._evaluator.observations = replace(seen, ending_since_s=since_s)
        if self._place.holder is not None:
            self._place.holder.seen_s = now
