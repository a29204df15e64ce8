# SPDX-License-Identifier: Apache-2.0
"""What one sidecar has seen over its own time, and who is gone by it.

A delete event alone cannot tell a death from a cut to the store. So a node whose key vanished is
gone only once it has stayed away on a healthy watch, once the store, asked after that, still has
no key of it, and once somebody else of its world shows that the store can be reached. Nothing here
is shared between sidecars: each counts for itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from launcher_shim.c10d.rounds.inputs import RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.records import Seat

CLOCK_SLACK_S = 0.1

Standing = Literal["here", "missing", "left", "replaced", "lapsed", "done"]
"""Of a frozen node. ``missing``: its key is away, but not for long enough to tell."""

LOST: frozenset[Standing] = frozenset({"left", "replaced", "lapsed"})
GONE: frozenset[Standing] = LOST | {"done"}


@dataclass(frozen=True, slots=True)
class RoundObservations:
    """Times are of this sidecar's monotonic clock.

    ``healthy_since_s``: since when the watch has worked without a gap. ``heard_s``: all that had
    happened in the store by then is known. ``return_until_s``: until when others that were cut off
    with this sidecar may be on their way back. ``missing_s``: since when the key of a frozen node
    is away. ``absent_s``: since when a listed member has no torchrun that connected.
    ``life_since_s``: since when this sidecar has been in the present life of the job.
    ``round_since_s``: since when this is the round. ``met_min_s``: since when it has had
    ``min`` nodes asking. ``left_s``: since when a node has left, and has not asked again.
    ``done``: who of this round was seen to have finished: that it goes, or its pod does, is no
    loss, nor that another torchrun comes there.
    """

    healthy_since_s: float = math.inf
    heard_s: float = -math.inf
    return_until_s: float = -math.inf
    missing_s: Mapping[Seat, float] = field(default_factory=dict)
    absent_s: Mapping[str, float] = field(default_factory=dict)
    round_number: int = -1
    round_since_s: float = -math.inf
    met_min_s: float | None = None
    left_s: Mapping[Seat, float] = field(default_factory=dict)
    life_since_s: float = -math.inf
    done: frozenset[Seat] = frozenset()


def observe(
    now: float,
    previous: RoundObservations,
    snapshot: RunSnapshot,
    policy: RoundPolicy,
    *,
    healthy_s: float,
    heard_s: float,
    cut_off: bool,
) -> RoundObservations:
    """Fold one snapshot in.

    ``healthy_s``: for how long the watch has worked without a gap (0 while it does not).
    ``heard_s``: the snapshot holds all that had happened by then. ``cut_off``: this sidecar's own
    key is, or was, away, or the store was restored. After that, as after a gap in the watch, the
    others may be cut off in the same way, so nothing is proven until they have had time to return.
    So it is when the first of a world comes back that had vanished as a whole: the others were cut
    off with it, and come back one after the other.
    """
    missing = {
        seat: previous.missing_s.get(seat, now)
        for seat in snapshot.round.frozen
        if seat.member not in snapshot.nodes
    }
    same_round = snapshot.round.number == previous.round_number
    world = frozenset(snapshot.round.frozen)
    all_away = bool(world) and (world == missing.keys() or world <= previous.missing_s.keys())
    met_min = previous.met_min_s if same_round else None
    if snapshot.round.complete or len(snapshot.asking()) < policy.min_nodes:
        met_min = None
    elif met_min is None:
        met_min = now
    healthy_since_s = now - healthy_s if healthy_s > 0 else math.inf
    return RoundObservations(
        healthy_since_s=healthy_since_s,
        heard_s=heard_s,
        return_until_s=_return_until(
            now, previous, policy, healthy_since_s, cut_off=cut_off or all_away
        ),
        missing_s=missing,
        absent_s={
            member: previous.absent_s.get(member, now)
            for member in snapshot.membership.listed
            if member not in snapshot.nodes
        },
        round_number=snapshot.round.number,
        round_since_s=previous.round_since_s if same_round else now,
        met_min_s=met_min,
        left_s={
            node.seat: previous.left_s.get(node.seat, now)
            for node in snapshot.nodes.values()
            if node.state == "left"
        },
        life_since_s=previous.life_since_s,
        done=_done(snapshot) | (previous.done if same_round else frozenset()),
    )


def _done(snapshot: RunSnapshot) -> frozenset[Seat]:
    if not snapshot.round.finishing:
        return frozenset()
    frozen = frozenset(snapshot.round.frozen)
    return snapshot.done | frozenset(
        node.seat
        for node in snapshot.nodes.values()
        if (node.finished or node.left_reason == "done") and node.seat in frozen
    )


def _return_until(
    now: float,
    previous: RoundObservations,
    policy: RoundPolicy,
    healthy_since_s: float,
    *,
    cut_off: bool,
) -> float:
    was_healthy = math.isfinite(previous.healthy_since_s)
    gap = was_healthy and healthy_since_s > previous.healthy_since_s + CLOCK_SLACK_S
    back = not was_healthy and math.isfinite(previous.return_until_s)
    if cut_off or gap or back:
        return now + policy.return_s
    return previous.return_until_s


@dataclass(frozen=True, slots=True)
class Standings:
    """Where each frozen node stands.

    ``wake_at_s``: when time alone may change that. ``unheard``: somebody has stayed away for long
    enough, and only what the store says now is still to be heard.
    """

    of: Mapping[Seat, Standing]
    wake_at_s: float = math.inf
    unheard: bool = False

    @property
    def lost(self) -> bool:
        """Whether somebody is gone who was not done: the world has to form again."""
        return any(standing in LOST for standing in self.of.values())

    def lost_beside(self, members: frozenset[str]) -> bool:
        """Whether somebody else than ``members`` is gone who was not done."""
        return any(
            standing in LOST and seat.member not in members for seat, standing in self.of.items()
        )

    @property
    def uncertain(self) -> bool:
        """Whether somebody is away who may be dead, or may be on the way back."""
        return "missing" in self.of.values()


def stand(
    now: float, snapshot: RunSnapshot, observations: RoundObservations, policy: RoundPolicy
) -> Standings:
    """Tell where each frozen node of the present round stands."""
    of: dict[Seat, Standing] = {}
    for seat in snapshot.round.frozen:
        node = snapshot.nodes.get(seat.member)
        if seat in observations.done and (node is None or node.seat != seat):
            of[seat] = "done"
        elif node is None:
            of[seat] = "missing"
        elif node.seat != seat:
            of[seat] = "replaced"
        elif node.state == "left":
            of[seat] = "done" if node.left_reason == "done" else "left"
        else:
            of[seat] = "here"
    missing = [seat for seat, standing in of.items() if standing == "missing"]
    if not missing:
        return Standings(of)
    since = {
        seat: max(observations.missing_s.get(seat, now), observations.healthy_since_s)
        for seat in missing
    }
    if any(standing in ("here", "left", "replaced") for standing in of.values()):
        back_s = observations.return_until_s
        # Who has finished needs nobody, and the others may be about to: what they do last, as an
        # upload, is not to be cut short for one that is cut off.
        wait_s = policy.orphan_hold_s if snapshot.round.finishing else policy.confirm_s
        due = {seat: max(since[seat] + wait_s, back_s) for seat in missing}
    elif snapshot.asking() or snapshot.left_out_ask():
        # Everybody at once: a cut, not a death, unless nobody comes back for very long.
        due = dict.fromkeys(missing, max(since.values()) + policy.orphan_hold_s)
    else:
        return Standings(of)
    for seat in missing:
        if min(now, observations.heard_s) >= due[seat]:
            of[seat] = "lapsed"
    wake_at_s = min((at for at in due.values() if at > now), default=math.inf)
    unheard = any(observations.heard_s < at <= now for at in due.values())
    return Standings(of, wake_at_s, unheard)
