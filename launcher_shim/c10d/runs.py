# SPDX-License-Identifier: Apache-2.0
"""What a decision about a run is made of: the store's word, the membership, and the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from launcher_shim.c10d.nodes import Node, Round


@dataclass(frozen=True, slots=True)
class Policy:
    """The job's size and the times that rounds are formed by (seconds).

    ``desired``: complete no smaller world while somebody may still be coming.
    ``last_call_s``: how long a world of ``min_nodes`` waits for a torchrun that was there before
    (from when it left, or from when it may ask again), or for ``desired``. ``first_call_s``: how
    long a world of fewer than ``max_nodes`` waits for a member whose torchrun has never connected;
    generous, because a small world at job start only has to be formed again. ``confirm_s``: how
    long a key must stay away before its node counts as dead (a reconnect and a renewal fit in).
    ``return_s``: the same after this sidecar itself, or the whole world, was cut off: the others
    may be on their way back as well. ``orphan_hold_s``: how long a world whose keys all vanished at
    once is kept for its return. ``hung_s``: how long an agent may be silent (its keep-alive thread
    asks every 5 s). ``leave_s``: how long one that is told to leave a world that trains no more may
    take, though it goes on asking; torch gives workers 30 s before it kills them, and waits for
    those that the kernel cannot end. Too short, and the others form a round without one that is
    merely slow, and another one to let it in; too long, and they wait for one that hangs.
    ``hold_s``: how long an answer may be held back for news, where torch would
    sleep for a second and ask again. It covers the last call; a signal to the agent is handled when
    the answer has come.
    ``life_s``: how long the first world of a later life of the job waits for those who have lived
    in it before, and have seen only now that a store restored to an earlier one is in it again.
    ``park_s``: how long an agent asks in a round that does not form, until it is parked, where its
    join has no time-out.
    """

    min_nodes: int
    max_nodes: int
    desired: int | None = None
    last_call_s: float = 2.0
    first_call_s: float = 30.0
    confirm_s: float = 4.0
    return_s: float = 15.0
    orphan_hold_s: float = 60.0
    hung_s: float = 30.0
    leave_s: float = 120.0
    hold_s: float = 2.0
    life_s: float = 2.0
    park_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Membership:
    """The part of the membership that rounds depend on; names of members.

    ``listed``: fit for a place, also those that are on standby only because there are no more
    places: who has one is for each round to say. ``ages``: what orders them, the oldest first.
    ``leaving``: drained, terminating or fenced; ``granted``: of these, those whose leave was
    granted. ``joins_wait``: the present world saves before it lets anybody in, so a newcomer must
    not cut it short. ``ends_round``: it has saved and stands still for somebody to go or come, so
    it must form again, whatever became of them. ``saved``: of those that leave, who has saved while
    others still do; whose loss is no reason to cut these short. ``quarantined``: of those listed,
    whose torchrun dies again and again.
    """

    listed: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    granted: frozenset[str] = frozenset()
    joins_wait: bool = False
    ends_round: bool = False
    saved: frozenset[str] = frozenset()
    ages: Mapping[str, int] = field(default_factory=dict)
    quarantined: frozenset[str] = frozenset()

    def may_join(self, member: str) -> bool:
        """Whether a node of ``member`` may be frozen into a round."""
        return member in self.listed and member not in self.leaving


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """One run at one store revision; immutable."""

    revision: int
    round: Round = field(default_factory=Round)
    nodes: Mapping[str, Node] = field(default_factory=dict)
    membership: Membership = field(default_factory=Membership)

    def asking(self) -> list[Node]:
        """Nodes that want a round and may have one, in the order in which places are given.

        Who was in the world before is first, so that nobody who comes back takes the place of one
        that trains; then the oldest member. Whoever does not ask has no claim to a place, and the
        quarantined are last.
        """
        may_join, ages = self.membership.may_join, self.membership.ages
        quarantined = self.membership.quarantined
        former = frozenset(self.round.former)
        return sorted(
            (n for n in self.nodes.values() if n.state == "asking" and may_join(n.member)),
            key=lambda node: (
                node.member in quarantined,
                node.member not in former,
                ages.get(node.member, 0),
                node.mod_revision,
                node.member,
            ),
        )

    def anybody_asks(self) -> bool:
        """Whether a node wants a round that does not leave, whether or not it may have one now."""
        leaving = self.membership.leaving
        return any(n.state == "asking" and n.member not in leaving for n in self.nodes.values())

    def candidates(self, min_nodes: int) -> list[Node]:
        """Of those that ask, who may be frozen: the quarantined only where the others are few."""
        asking = self.asking()
        fit = [node for node in asking if node.member not in self.membership.quarantined]
        return fit if len(fit) >= min_nodes else asking

    def newcomers(self, max_nodes: int) -> bool:
        """Whether somebody asks to join the present world, and it has room."""
        frozen, quarantined = self.round.frozen, self.membership.quarantined
        return (
            self.round.complete
            and len(frozen) < max_nodes
            and any(
                node.seat not in frozen and node.member not in quarantined for node in self.asking()
            )
        )
