# SPDX-License-Identifier: Apache-2.0
"""The view of the rendezvous that each agent is shown, and torch's state that shows it.

Agents never decide: each sees a state made for it, in which the only thing left for torch to do is
the right one. Only the agent's own description in it is real. Heartbeats and deadlines are in the
far future: liveness comes from leases.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import Literal

from launcher_shim.c10d.rounds.inputs import RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.observations import Standings
from launcher_shim.c10d.rounds.records import Node, Round, own_round
from launcher_shim.c10d.rounds.world import Reform
from launcher_shim.c10d.state_codec import NodeDesc, TorchState
from rdzv.dataclass import dataclass

Role = Literal["apart", "participant", "asking", "parked", "promoted", "waiting"]
"""The agent's position in the rendezvous, as its view shows it.

``apart``: in no list. ``participant``: in the frozen world. ``asking``: in an open round.
``parked``: on the redundancy list of a full world, where torch waits without a timeout.
``promoted``: on the redundancy list of an empty one: torch takes itself off and renews its join
deadline. ``waiting``: in the wait list of a full world.
"""


HELD_MAX_S = 0.9
"""Maximum time for which a look is held. Longer: a signal, or a worker that fails, is noticed later
by as much. Shorter: more changes fall between two looks."""

HELD_BEFORE_S = 0.7
"""Part of it that lies before the time at which newcomers are let in: the save takes the rest."""


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
    policy: RoundPolicy,
    node: Node,
    *,
    parked: bool,
    parks: bool,
    waited_s: float = 0.0,
) -> View:
    """Build the view of ``node``; ``snapshot`` has its record as it should be.

    ``parked``: whether the agent was last shown ``parked`` (or may have been, before a restart) and
    has not taken itself off the list since. ``parks``: whether its torch has a redundancy list
    (from 2.3 on) and it has the job's maximum; if not, it waits in the wait list, where its join
    may time out. ``waited_s``: for how many seconds its join timeout has run. A round below ``min``
    may take days to form.
    """
    current = snapshot.round
    member = node.member
    leaving = member in snapshot.membership.leaving
    if current.is_world_of(node):
        again = must_leave(snapshot, node)
        closed = current.closed == "success"
        return View("participant", shown_round_of(current, node), phantom=again, closed=closed)
    if current.takes_in(node):
        return View("participant", shown_round_of(current, node))
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


def held_for(
    now: float,
    asked_s: float,
    snapshot: RunSnapshot,
    reform: Reform,
    policy: RoundPolicy,
    node: Node,
    shown: View,
    *,
    ends: bool = False,
    evicts_s: float = math.inf,
) -> tuple[float, str]:
    """Return for how many seconds the answer to a look of ``node`` may be held back, and why.

    ``asked_s``: when it looked. ``shown``: its view, which is what it was shown last. ``ends``: it
    is due to write that its world must form again, as a node is lost. ``evicts_s``: when a silent
    node of its world may be evicted. torch looks once a second at most, so a change
    that comes between two looks is seen late. While it looks it handles no signal and sees no
    worker fail: so only beside a change, and in no pod that leaves.
    """
    if shown.phantom or shown.closed or shown.role in ("apart", "promoted"):
        return 0.0, "it has something to do"
    membership, current = snapshot.membership, snapshot.round
    if node.member in membership.leaving:
        return 0.0, "its pod leaves"
    left_s = asked_s + HELD_MAX_S - now
    if left_s <= 0:
        return 0.0, "it was held for long enough"
    if not current.complete:
        forms = len(snapshot.candidates(policy.smallest)) >= policy.smallest
        return (left_s, "a round forms") if forms else (0.0, "no round can form yet")
    if current.is_ending:
        return left_s, "the next round is about to open"
    if current.world:
        return 0.0, "its world changes in place"
    if any(seat.member in membership.leaving for seat in current.frozen):
        return left_s, "a drain is in progress"
    if ends or membership.ends_round or membership.join_agreed or reform.cause:
        return left_s, "the world is about to form again"
    # A look before that is answered at once: the next one comes in time.
    if asked_s >= reform.wake_at_s - HELD_BEFORE_S:
        return left_s, "newcomers are about to be let in"
    if evicts_s - HELD_BEFORE_S <= asked_s < evicts_s + HELD_MAX_S:
        return left_s, "a node is about to be evicted"
    return 0.0, "nothing is in progress"


FRUITLESS_FREE = 2
"""The number of requests in a row without effect that are answered at once."""

DELAY_MIN_S = 0.2
DELAY_MAX_S = 1.0


@dataclass(slots=True)
class Row:
    """A row of requests without effect: torch repeats them thousands of times a second."""

    length: int = 0
    last_s: float = 0.0

    def count(self, now: float, *, fruitless: bool) -> float:
        """Count one request; return for how many seconds to delay its answer."""
        broken = not fruitless or now - self.last_s > 2 * DELAY_MAX_S
        self.length = int(fruitless) if broken else self.length + 1
        self.last_s = now
        if self.length <= FRUITLESS_FREE:
            return 0.0
        return min(DELAY_MAX_S, DELAY_MIN_S * 2.0 ** (self.length - FRUITLESS_FREE - 1))


def shown_round_of(current: Round, node: Node) -> Round:
    """Return the round that the torchrun of ``node`` is shown, which never becomes another one.

    Those that were there from its beginning are shown the seats of then. One that came into its
    world later has a round of its own, in which it is the last: as the first it would be asked for
    the master's address.
    """
    if not node.own:
        return replace(current, frozen=current.began, began=()) if current.began else current
    others = tuple(seat for seat in current.frozen if seat.member != node.member)
    return Round(node.round, complete=True, frozen=(*others, node.seat))


def must_leave(snapshot: RunSnapshot, node: Node) -> bool:
    """Return whether ``node``, which is in the present world, must leave it and ask again.

    That holds for draining members too: they do not train on with a node that is merely cut off
    while the others form the next world. A granted member stands still until its SIGTERM. That one
    node has finished excuses no other: without a lost one, they never finish.
    """
    granted = node.member in snapshot.membership.granted
    return snapshot.round.is_ending and not node.finished and not granted


def somebody_goes_on(snapshot: RunSnapshot, standings: Standings) -> bool:
    """Return whether a node of the present world trains, or has left or must leave to ask again.

    If another torchrun asks in the place of one that has not finished, it does that one's work
    over.
    """
    granted, leaving = snapshot.membership.granted, snapshot.membership.leaving
    for seat, standing in standings.of.items():
        node = snapshot.nodes.get(seat.member)
        if node is None:
            continue
        if node.nonce == seat.nonce and (node.ask > seat.ask or node.left_reason == "exit"):
            return True
        if seat.member in granted:
            continue
        if standing == "here" and not node.finished:
            return True
        if standing == "replaced" and node.state == "asking" and seat.member not in leaving:
            return True
    return False


def hand(snapshot: RunSnapshot, node: Node) -> Node | None:
    """Return ``node`` with a place in the completed round; None if there is nothing to change.

    If the world must form again before all have their places, ``node`` withdraws and asks again.
    The same holds if the store has lost the round, and with it perhaps the master's address, which
    no node stores again.
    """
    current = snapshot.round
    if not current.complete or node.state != "asking":
        return None
    if node.seat not in current.frozen:
        may_join = snapshot.membership.may_join(node.member)
        alone = replace(node, state="in", round=own_round(node.seat), own=True)
        return alone if may_join and current.takes_in(alone) else None
    if current.is_ending or current.restored:
        return replace(node, ask=node.ask + 1)
    return replace(node, state="in", round=current.number)


NOWHERE_PORT = b"1"
"""tcpmux: no process listens there, so that the workers never find what they look for."""

LAST_OUT = b"torchelastic/agent/terminal_state/last_member"
"""The key that the last node of a world sets at its exit; the others of this one are in a later
world."""

FAR_FUTURE = datetime(9000, 1, 1, tzinfo=UTC)
"""The time of every heartbeat and deadline: torch never finds a node dead, nor a last call over."""

WAITER = NodeDesc("~waiter", 0, 0)
"""A waiter that does not exist. No real node has the process id 0."""


def portray(view: View, me: NodeDesc, member: str, max_nodes: int) -> TorchState:
    """Render ``view`` for the agent of ``member``, which calls itself ``me``."""
    participants: dict[NodeDesc, int] = {}
    if view.role == "participant":
        participants = {
            me if seat.member == member else NodeDesc(f"~{seat.member}", 0, 0): rank
            for rank, seat in enumerate(view.round.frozen)
        }
    elif view.role == "asking":
        # Of an open round, torch reads only whether it is in it itself.
        participants = {me: 0}
    elif view.full:
        participants = {NodeDesc("~full", 0, place): place for place in range(max_nodes)}
    return TorchState(
        round=view.round.number,
        complete=view.full or view.role in ("participant", "promoted"),
        deadline=FAR_FUTURE if view.role == "asking" else None,
        closed=view.closed,
        participants=participants,
        wait_list=frozenset([WAITER] if view.phantom else [me] if view.role == "waiting" else []),
        redundancy_list=frozenset([me] if view.role in ("parked", "promoted") else []),
        last_heartbeats={me: FAR_FUTURE},
    )


def filler(name: bytes) -> bytes | None:
    """Return a value for an unset key of a world that will never form; None for any other key.

    Between the rendezvous and its workers an agent waits for keys that others of its world set. If
    one of them is gone it would wait 300 s and then close the job. So it is given values that are
    never stored: it gets through, starts workers that reach no others, comes to its monitor loop
    and finds there that the world forms again. No restart is used up. The value must not form a
    world: rank 1 of a million is never complete (a world of one would start to train by itself).
    """
    if name == LAST_OUT:
        return b""
    if name == b"MASTER_ADDR":
        return b"127.0.0.1"
    if name == b"MASTER_PORT":
        return NOWHERE_PORT
    if name.startswith(b"torchelastic/role_info/"):
        return json.dumps({"role": "default", "rank": 1, "local_world_size": 1}).encode()
    if name.startswith(b"torchelastic/assigned_ranks/"):
        return json.dumps([1, 1_000_000, 1, 1_000_000]).encode()
    return None
