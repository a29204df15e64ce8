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

log = logging.getLogger(__name__)


class HangWatch:
    """The watch over the torchrun that holds ``place``."""

    def __init__(self, place: Place, policy: Callable[[], RoundPolicy]) -> None:
        self._place = place
        self._policy = policy

    def leave_if_hung(self, evaluation: Evaluation, now: float) -> float:
        """Put a tombstone on the node of a torchrun that hangs; return when to check again."""
        claim = self._place.holder
        node = self._place.own_node(claim) if claim is not None else None
        if claim is None or node is None or node.state == "left":
            return math.inf
        stays = evaluation.standings.of.get(node.seat) == "hung"
        signs = Signs(claim.seen_s, claim.pending > 0, stays)
        decision = hanging.decide(now, signs, self._policy())
        if decision.hangs:
            log.warning("the torchrun here hangs: %s", decision.reason)
            self._place.leave(claim, "done" if node.finished else "hung")
        return decision.wake_at_s

    def excuse(self, now: float) -> None:
        """Count from ``now`` on, after a stop of this sidecar itself."""
        if self._place.holder is not None:
            self._place.holder.excuse(now)
