# SPDX-License-Identifier: Apache-2.0
"""The removal of a torchrun that hangs from its run, so that the others go on without it."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from launcher_shim.c10d.rounds import hanging
from launcher_shim.c10d.rounds.evaluation import Evaluation, Evaluator
from launcher_shim.c10d.rounds.hanging import Save, Signs
from launcher_shim.c10d.rounds.place import Place
from launcher_shim.c10d.rounds.records import Seat

log = logging.getLogger(__name__)


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
        decision = hanging.decide(now, signs, self._evaluator.policy())
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
