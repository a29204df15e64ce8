# SPDX-License-Identifier: Apache-2.0
"""The decision to replace a world that is whole by another: pure, the same in every sidecar.

Each world costs all ranks a restart, so newcomers are gathered: training goes on until the wave of
them is complete, or the gather window is over, and at least to the world's first step. A world that
is larger than the job's sizes allow becomes smaller at once, and that of a paused job ends. A world
that has lost a node forms again in any case, and takes in the nodes that wait.
"""

from __future__ import annotations

import math

from launcher_shim.c10d.rounds.inputs import RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.observations import RoundObservations, joins_from_s
from rdzv.dataclass import dataclass
from rdzv.drain.inputs import ReformCause

CALM_SHARE = 1 / 3
"""Fraction of the gather window without a newcomer after which the wave is over. Smaller: a late
node costs a world of its own. Larger: a node that comes alone waits longer beside the world."""

LEAD_S = 1.1
"""Time from the last newcomer to the end of the world. torch's agents look once a second: with this
notice each of them has a look that is held (``views.held_for``) when the world ends. The ranks
train on meanwhile."""


@dataclass(frozen=True, slots=True)
class Reform:
    """The cause for which the present world is to form again; empty if it is not to.

    ``reason``: one sentence; empty if no node asks for another world. ``wake_at_s``: the time at
    which the decision would change by time alone.
    """

    cause: ReformCause = ""
    reason: str = ""
    wake_at_s: float = math.inf


def reform(
    now: float, snapshot: RunSnapshot, observations: RoundObservations, policy: RoundPolicy
) -> Reform:
    """Decide whether the present world is to form again although it has lost no node."""
    current = snapshot.round
    if not current.complete or current.closed or current.finishing:
        return Reform()
    if policy.paused:
        return Reform("pause", "the job is paused")
    # The world goes on without their torchruns once it has saved.
    nodes = (snapshot.nodes.get(seat.member) for seat in current.frozen)
    silent = [n.member for n in nodes if n is not None and n.silent and n.seat in current.frozen]
    if silent:
        return Reform(
            "hang", f"the torchrun of {', '.join(silent)} is silent while its ranks train"
        )
    here, newcomers = len(current.frozen), len(snapshot.newcomers())
    size = policy.sizes.largest(here + newcomers)
    if policy.shrinks and 0 < size < here:
        return Reform("shrink", f"a world of {here} may have no more than {size} nodes")
    if current.world:
        return Reform()  # It takes newcomers in, and lets go, in place.
    # The next world may leave out members of this one: not to become smaller for that.
    size = policy.sizes.largest(snapshot.next_size(policy.sizes.smallest))
    if size <= here:
        return Reform()
    wave = f"{newcomers} more {'asks' if newcomers == 1 else 'ask'} to join a world of {here}"
    if snapshot.membership.join_agreed:
        return Reform("join", f"{wave}: its ranks were asked to save for that")
    first_s = joins_from_s(current, observations.formed_s)
    if now < first_s:
        return Reform("", f"{wave}: waiting for the first step of its ranks", first_s)
    since_s = now if observations.gather_since_s is None else observations.gather_since_s
    # A world costs at least its start: a shorter window would spend more time on starts than on
    # steps.
    gather_s = max(policy.gather_s, current.start_s)
    over_s = min(since_s + gather_s, observations.newest_s) + LEAD_S
    if size == policy.sizes.full:
        what = "which makes it full"
    elif policy.desired is not None and here < policy.desired <= size:
        what = f"which makes the desired {policy.desired}"
    else:
        what = "and the wave is over"
        calm_s = max(since_s, observations.newest_s) + gather_s * CALM_SHARE
        over_s = max(over_s, min(since_s + gather_s, calm_s))
    if now < over_s:
        return Reform("", f"{wave}: gathering others until the wave is over", over_s)
    return Reform("join", f"{wave}, {what}")
