# SPDX-License-Identifier: Apache-2.0
"""The removal of a torchrun that hangs from its run, so that the others go on without it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from launcher_shim.c10d.rounds import hanging
from launcher_shim.c10d.rounds.evaluation import Evaluation
from launcher_shim.c10d.rounds.hanging import Signs
from launcher_shim.c10d.rounds.inputs import RoundPolicy
from launcher_shim.c10d.rounds.place import Place
from launcher_shim.c10d.rounds.records import Seat
from launcher_shim.c10d.rounds.views import trains_no_more

log = logging.getLogger(__name__)


class HangWatch:
    """The watch over the torchrun that holds ``place``."""

    def __init__(self, place: Place, policy: Callable[[], RoundPolicy]) -> None:
        self._place = place
        self._policy = policy
        self._leave_shown: tuple[Seat, float] | None = None

    def leave_if_hung(self, evaluation: Evaluation, now: float) -> float:
        """Put a tombstone on the node of a torchrun that hangs; return when to check again."""
        claim = self._place.holder
        node = self._place.own_node(claim) if claim is not None else None
        if claim is None or node is None or node.state == "left":
            self._leave_shown = None
            return math.inf
        if not trains_no_more(evaluation.snapshot, evaluation.standings, node, claim.filled_round):
            self._leave_shown = None
        elif self._leave_shown is None or self._leave_shown[0] != node.seat:
            self._leave_shown = (node.seat, now)
        signs = Signs(
            claim.seen_s, claim.pending > 0, self._leave_shown[1] if self._leave_shown else None
        )
        decision = hanging.decide(now, signs, self._policy())
        if decision.hangs:
            log.warning("the torchrun here hangs: %s", decision.reason)
            self._place.leave(claim, "done" if node.finished else "hung")
        return decision.wake_at_s

    def excuse(self, now: float) -> None:
        """Count from ``now`` on, after a stop of this sidecar itself."""
        if self._place.holder is not None:
            self._place.holder.excuse(now)
            self._leave_shown = None
