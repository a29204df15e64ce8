# SPDX-License-Identifier: Apache-2.0
"""One sidecar's evaluation of a run: the stored run, its own node, and which nodes are gone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.mirrored_run import MirroredRun
from launcher_shim.c10d.rounds.observations import (
    RanksSeen,
    RoundObservations,
    Standings,
    observe,
    stand,
)
from launcher_shim.c10d.rounds.own_node import OwnNode
from launcher_shim.c10d.rounds.records import Node, Round
from launcher_shim.c10d.rounds.reform import Reform, reform
from rdzv.dataclass import dataclass
from rdzv.job import JobClient


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of the run."""

    own: Node | None
    """This sidecar's node as it should be."""
    stored: RunSnapshot
    """The run as the mirror has it."""
    snapshot: RunSnapshot
    """The same, with this sidecar's node as it should be."""
    standings: Standings
    reform: Reform
    """The cause for which the stored world is to form again, if there is one."""

    @property
    def wake_at_s(self) -> float:
        """The time at which it would change by time alone."""
        return min(self.standings.wake_at_s, self.reform.wake_at_s)


class Evaluator:
    """The evaluator of one run; evaluates again whenever an input has changed.

    ``membership`` (called with the current round) and ``policy`` must be cheap. ``life_since_s``:
    as in ``RoundObservations``.
    """

    def __init__(
        self,
        run: MirroredRun,
        own: OwnNode,
        client: JobClient,
        *,
        member: str,
        policy: Callable[[], RoundPolicy],
        membership: Callable[[Round], RoundMembers],
        clock: Callable[[], float],
        life_since_s: float = -math.inf,
    ) -> None:
        self.observations = RoundObservations(life_since_s=life_since_s)
        self.cut_off = False
        """Whether other nodes' keys may be away for no fault of theirs: since the last evaluation,
        the store was restored or emptied, or has refused a write for want of space."""
        self.ranks = RanksSeen(-1)
        """The newest reports of the ranks of this pod."""
        self._run = run
        self._own = own
        self._mirror = client.mirror
        self.member = member
        self.policy = policy
        self.clock = clock
        self._membership = membership
        self._evaluation: Evaluation | None = None

    def members(self) -> RoundMembers:
        """Return the membership that the current round depends on."""
        return self._membership(self._run.round)

    def stored(self) -> RunSnapshot:
        """Return the run as the mirror has it."""
        return self._run.snapshot(self._mirror.certain_revision, self.members())

    def outdate(self) -> None:
        """Drop the last evaluation."""
        self._evaluation = None

    def evaluate(self) -> Evaluation:
        """Return the present evaluation, the basis of views and decisions; evaluate if needed."""
        now, own, membership = self.clock(), self._own.node, self.members()
        evaluation = self._evaluation
        if (
            evaluation is None
            or evaluation.own is not own
            or evaluation.snapshot.membership != membership
            or now >= evaluation.wake_at_s
        ):
            policy = self.policy()
            stored = self.stored()
            frozen = stored.round.frozen
            self.observations = observe(
                now,
                self.observations,
                stored,
                policy,
                healthy_s=self._mirror.healthy_for_s(now),
                cut_off=self._own.take_loss() or self.cut_off,
                ranks=self.ranks if frozen and frozen[0].member == self.member else None,
            )
            self.cut_off = False
            shown = stored
            if own is not None:
                shown = replace(stored, nodes={**stored.nodes, self.member: own})
            standings = stand(now, shown, self.observations, policy)
            reforms = reform(now, stored, self.observations, policy)
            evaluation = self._evaluation = Evaluation(own, stored, shown, standings, reforms)
        return evaluation
