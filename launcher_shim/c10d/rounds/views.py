# SPDX-License-Identifier: Apache-2.0
"""The view of the rendezvous that each agent is shown.

Agents never decide: each sees a state made for it, in which the only thing left for torch to do is
the right one. Only the agent's own description in it is real. Heartbeats and deadlines are in the
far future: liveness comes from leases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from launcher_shim.c10d.rounds.inputs import RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.observations import Standings
from launcher_shim.c10d.rounds.records import Node, Round
from launcher_shim.c10d.rounds.reform import Reform

Role = Literal["apart", "participant", "asking", "parked", "promoted", "waiting"]
"""The agent's position in the rendezvous, as its view shows it.

``apart``: in no list. ``participant``: in the frozen world. ``asking``: in an open round.
``parked``: on the redundancy list of a full world, where torch waits without a timeout.
``promoted``: on the redundancy list of an empty one: torch takes itself off and renews its join
deadline. ``waiting``: in the wait list of a full world.
"""


@dataclass(frozen=True, slots=True)
class View:
    """The rendezvous as one agent is shown it; two equal views are the same bytes."""

    role: Role
    round: Round
    full: bool = False
    """To an agent that is not in the world: whether that world looks complete and full."""
    phantom: bool = False
    """Whether it shows a waiter that does not exist. That makes torch leave the world without using
    up a restart."""
    closed: bool = False
    """Whether the run looks closed."""


def view(
    snapshot: RunSnapshot,
    standings: Standings,
    policy: RoundPolicy,
    reform: Reform,
    node: Node,
    *,
    parked: bool,
    parks: bool,
    filled_round: int,
    waited_s: float = 0.0,
) -> View:
    """Build the view of ``node``; ``snapshot`` has its record as it should be.

    ``parked``: whether the agent was last shown ``parked`` (or may have been, before a restart) and
    has not taken itself off the list since. ``parks``: whether its torch has a redundancy list
    (from 2.3 on) and it has the job's maximum; if not, it waits in the wait list, where its join
    may time out. ``filled_round``: the round for which it was given fillers. ``waited_s``: for how
    many seconds its join timeout has run. A round below ``min`` may take days to form.
    """
    current = snapshot.round
    member = node.member
    leaving = member in snapshot.membership.leaving
    if current.is_world_of(node):
        again = trains_no_more(snapshot, standings, node, filled_round) or (
            not leaving and not node.finished and must_form_again(snapshot, standings, reform)
        )
        return View("participant", current, phantom=again, closed=current.closed == "success")
    number = Round(current.number)
    if current.closed == "success":
        return View("apart", number, closed=True)
    if node.state == "in" or node.left_reason == "hung":
        # Its world is gone, or went on without it: it has to ask again.
        return View("apart", number, phantom=not leaving)
    welcome = snapshot.membership.may_join(member)
    frozen = current.complete and node.seat in current.frozen
    waits = waited_s >= policy.park_s and parks and not frozen
    if node.state == "asking" and (frozen or (welcome and not current.complete and not waits)):
        # A frozen node is shown the world only once its record has its place; a drain that begins
        # in between does not change that.
        return View("promoted" if parked else "asking", number)
    if node.state == "asking":
        return View("parked" if parks else "waiting", number, full=True)
    return View("apart", number, full=current.complete or not welcome)


def trains_no_more(
    snapshot: RunSnapshot, standings: Standings, node: Node, filled_round: int
) -> bool:
    """Return whether ``node`` must leave its world because it can train in it no more.

    ``filled_round``: as for ``view``. A world that only waits to let a member in trains on.
    """
    current = snapshot.round
    if not current.is_world_of(node) or node.finished:
        return False
    # A filler cannot be taken back: its workers look for each other where no worker is, even if all
    # nodes of its world have returned.
    if filled_round == current.number:
        return True
    if node.member in snapshot.membership.granted:
        return False
    if _is_lost(snapshot, standings):
        return True
    return node.member not in snapshot.membership.leaving and _stands_still(snapshot)


def somebody_goes_on(snapshot: RunSnapshot, standings: Standings) -> bool:
    """Return whether a node of the present world trains, or has left or must leave to ask again.

    If another torchrun asks in the place of one that has not finished, it does that one's work
    over.
    """
    if snapshot.goes_on():
        return True
    granted, leaving = snapshot.membership.granted, snapshot.membership.leaving
    for seat, standing in standings.of.items():
        node = snapshot.nodes.get(seat.member)
        if node is None or seat.member in granted:
            continue
        if standing == "here" and not node.finished:
            return True
        if standing == "replaced" and node.state == "asking" and seat.member not in leaving:
            return True
    return False


def must_form_again(snapshot: RunSnapshot, standings: Standings, reform: Reform) -> bool:
    """Return whether the present world must leave its round and form a new one."""
    current = snapshot.round
    if not current.complete or current.closed == "success":
        return False
    membership = snapshot.membership
    if _is_lost(snapshot, standings) or _stands_still(snapshot):
        return True
    if current.finishing:
        return False
    # The whole world lets a newcomer in at once. Nodes that left for a newcomer, while others are
    # reconnecting after a cut, would meet those only in yet another round.
    return bool(reform.cause) and not standings.uncertain and not membership.joins_wait


def _is_lost(snapshot: RunSnapshot, standings: Standings) -> bool:
    """Return whether no node of the present world can train or save in it any more.

    That holds for draining members too: they leave it as the others do, and do not train on with a
    node that is merely cut off while the others form the next world. A granted member stands still
    until its SIGTERM. That one node has finished excuses no other: without the lost one, they never
    finish.
    """
    current = snapshot.round
    if not current.complete or current.closed == "success":
        return False
    return bool(current.closed) or standings.lost_beside(snapshot.membership.saved)


def _stands_still(snapshot: RunSnapshot) -> bool:
    """Return whether the present world has saved, and stands still for a leave or a join."""
    current, membership = snapshot.round, snapshot.membership
    if not current.complete or current.finishing or current.closed == "success":
        return False
    return membership.ends_round or any(s.member in membership.granted for s in current.frozen)


def hand(snapshot: RunSnapshot, standings: Standings, node: Node) -> Node | None:
    """Return ``node`` with a place in the completed round; None if there is nothing to change.

    If a member is gone before all have their places, that world cannot form: ``node`` withdraws
    and asks again. The same holds if the store has lost the round, and with it perhaps the
    master's address, which no node stores again.
    """
    current = snapshot.round
    if not current.complete or node.state != "asking" or node.seat not in current.frozen:
        return None
    others = (standing for seat, standing in standings.of.items() if seat != node.seat)
    gone = any(standing not in ("here", "missing") for standing in others)
    if current.closed or current.restored or gone:
        return replace(node, ask=node.ask + 1)
    return replace(node, state="in", round=current.number)
