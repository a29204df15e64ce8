# SPDX-License-Identifier: Apache-2.0
"""The place of this sidecar's member in one run: the connection that holds it, and its node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from launcher_shim.c10d.rounds.mirrored_run import MirroredRun
from launcher_shim.c10d.rounds.own_node import Evaluator, OwnNode
from launcher_shim.c10d.rounds.records import LeftReason, Node
from rdzv.mirror import Mirror
from rdzv.records.quarantine import FormedWorld, Stay


@dataclass(slots=True, eq=False)
class Claim:
    """One connection's claim to its member's place; its agent writes the fields.

    A newer connection of the same member replaces the older one when it first names itself.
    """

    nonce: str
    """Names the connection, also to later sidecars."""
    seen_s: float
    """Time of the torchrun's last sign of life; monotonic, as all times here."""
    asked_s: float
    """Start of its join timeout: the time at which it asked, or was promoted."""
    pending: int = 0
    """Number of unanswered requests: while there is one, silence is no sign of a hang."""
    parked: bool = False
    """Whether its last view had it on the redundancy list, which only a promotion ends."""
    parks: bool = True
    """Whether its version of torch has a redundancy list, and its maximum is the job's."""
    world: FormedWorld | None = None
    """The world that it was last handed; None before the first."""
    gave_up: bool = False
    """Whether its torchrun has given up its wait for a place by itself: that is no death."""
    addr: str = ""
    pid: int = -1
    """Its torchrun's process number, in its own container; -1 while it has not named itself."""
    local_id: int = -1
    flavour: str = ""
    """The encoding of a state by its torch (``launcher_shim.c10d.state_codec.spell_flavour``)."""

    @property
    def named(self) -> bool:
        """Whether its torchrun has named itself."""
        return self.pid >= 0

    def resume(self, node: Node) -> None:
        """Take over from ``node`` the names that a client which outlived its sidecar has given."""
        self.addr, self.pid, self.local_id = node.addr, node.pid, node.local_id
        self.flavour = node.flavour
        # The former sidecar may have parked it: a promotion is safe at any time.
        self.parked = True

    def asking(self, member: str, ask: int) -> Node:
        """Build the record by which ``member`` asks for the ``ask``-th time on this connection."""
        return Node(
            member=member,
            state="asking",
            nonce=self.nonce,
            ask=ask,
            addr=self.addr,
            pid=self.pid,
            local_id=self.local_id,
            flavour=self.flavour,
        )


class Place:
    """The place, held by one claim at a time; sets the desired node as its holder asks.

    ``changed`` is called if the desired node has changed, ``came`` with the nonce of each torchrun
    of this pod that asks, ``entered`` with that of one that has come into a world, and ``died``
    with the last stay of one that has ended by itself; its steps are not known yet.
    """

    def __init__(
        self,
        run: MirroredRun,
        own: OwnNode,
        mirror: Mirror,
        evaluator: Evaluator,
        *,
        random: Random,
        changed: Callable[[], None],
        came: Callable[[str], None],
        entered: Callable[[str, FormedWorld], None],
        died: Callable[[Stay], None],
    ) -> None:
        self.holder: Claim | None = None
        """The claim that holds the place."""
        self._next: tuple[Claim, Node] | None = None
        self._run = run
        self._own = own
        self._mirror = mirror
        self._member = evaluator.member
        self._members = evaluator.members
        self._clock = evaluator.clock
        self._random = random
        self._changed = changed
        self._came = came
        self._entered = entered
        self._died = died

    def claim(self, nonce: str | None = None, kept: Node | None = None) -> Claim:
        """Create the claim of a new client connection.

        ``nonce``: that of a connection that may outlive the sidecar. ``kept``: its node as an
        earlier sidecar of this member had it, put back if the store has lost it with the lease, or
        has an older one, as after a restore from a backup.
        """
        now_s = self._clock()
        claim = Claim(nonce or f"{self._random.getrandbits(64):016x}", now_s, now_s)
        if kept is not None and (kept.member, kept.nonce) != (self._member, nonce):
            kept = None
        node = self._run.node(self._member)
        if node is None or (kept is not None and kept.is_later_than(node)):
            node = kept
        if node is not None and node.nonce == nonce:
            self._resume(claim, node)
        elif kept is not None:
            # Another torchrun of the pod counts if it is still there to claim its record. If it is
            # not, that record expires soon with its former lease.
            claim.resume(kept)
            self._next = (claim, kept)
        return claim

    def resume_next(self) -> None:
        """Give the place to the claim that waits for it, if no other torchrun has claimed it."""
        if self._next is not None and self.holder is None:
            self._resume(*self._next)
            self._changed()
        self._next = None

    def adopt(self, claim: Claim) -> None:
        """Take over a claim of a former generation: its world was there, so it has to ask again."""
        if claim.named:
            self.holder = claim
            node = claim.asking(self._member, 0)
            self._aim(replace(node, state="left", left_reason="hung"))

    def take_over(self, claim: Claim) -> None:
        """Give the place to ``claim``, and put a tombstone on the node of its former holder."""
        if self.holder is not claim and (node := self._own.node) and node.state != "left":
            self._own.aim(replace(node, state="left", left_reason="closed", round=0))
        self.holder = claim

    @property
    def has_node(self) -> bool:
        """Whether a node of this member is stored, or desired."""
        return self._own.node is not None or self._run.node(self._member) is not None

    def own_node(self, claim: Claim) -> Node | None:
        """Return the desired node of ``claim``; None if it does not hold the place."""
        node = self._own.node
        return node if claim is self.holder and node and node.nonce == claim.nonce else None

    def live_node(self, claim: Claim) -> Node | None:
        """Return the desired node of ``claim`` if it is in the live round."""
        node = self.own_node(claim)
        return node if node is not None and self._run.round.is_world_of(node) else None

    async def join(self, claim: Claim) -> bool:
        """Write that ``claim`` asks, if it does not yet; return whether it holds the place."""
        if claim is not self.holder:
            return False
        node = self._own.node
        if node is None or node.nonce != claim.nonce or node.state != "asking":
            claim.world = None
            self._came(claim.nonce)
            await self._write(claim.asking(self._member, node.ask + 1 if node else 1))
        return True

    async def leave_written(self, claim: Claim) -> bool:
        """Write that ``claim`` has withdrawn; return whether it held the place."""
        node = self.own_node(claim)
        if node is None:
            return False
        if node.state != "left":
            await self._write(replace(node, state="left", left_reason="exit", round=0))
        return True

    def handed(self) -> None:
        """Note that the holder's node has come into a world, if it has."""
        if self.holder is not None and self.live_node(self.holder) is not None:
            self._enter(self.holder)

    def follow(self) -> None:
        """Note the progress of the world that the holder is in, as the round has it."""
        claim, current = self.holder, self._run.round
        if claim is None or claim.world is None or self.live_node(claim) is None:
            return
        world = replace(claim.world, progress=current.progress, start_s=current.start_s)
        if world != claim.world:
            claim.world = world
            self._entered(claim.nonce, world)

    def finish(self, claim: Claim) -> None:
        """Mark the node of ``claim`` as finished: its agent is in the exit barrier."""
        node = self.live_node(claim)
        if node is not None and not node.finished:
            self._aim(replace(node, finished=True))

    def call_silent(self, claim: Claim, *, silent: bool) -> None:
        """Mark the node of ``claim`` in the live round as silent, or as silent no more."""
        node = self.live_node(claim)
        if node is not None and node.silent != silent:
            self._aim(replace(node, silent=silent))

    async def finish_written(self, claim: Claim) -> None:
        """Mark the node as finished, and wait until that is stored.

        The others must not see the barrier before: the node that closes the run reads all records.
        """
        node = self.live_node(claim)
        if node is not None and not node.finished:
            await self._write(replace(node, finished=True))

    def forfeit(self, claim: Claim) -> None:
        """Give the node of ``claim`` up, which waits for what its world has lost: it asks again."""
        if (node := self.live_node(claim)) is not None and not node.finished:
            self._aim(replace(node, state="left", left_reason="hung", round=0))

    def ask_again(self) -> None:
        """Let the torchrun in a round of its own ask again: the world goes on without its ranks."""
        node, current = self._own.node, self._run.round
        if node is not None and current.takes_in(node) and node.seat not in current.frozen:
            self._aim(replace(node, state="left", left_reason="hung", round=0))

    def leave(self, claim: Claim, reason: LeftReason) -> None:
        """Put a tombstone on the node of ``claim``; it is written as soon as the store answers."""
        node = self.own_node(claim)
        if node is not None and node.state != "left":
            self._own.aim(replace(node, state="left", left_reason=reason, round=0))
            ordered = self._member in self._members().leaving or self._run.round.closed == "success"
            world = claim.world if node.state == "in" else self._awaited_in(node)
            by_itself = reason in ("closed", "hung") and not (ordered or claim.gave_up)
            if by_itself and world is not None:
                self._died(Stay(node.nonce, world, self._clock() - world.since_s))
            self._changed()
        elif self._next is not None and self._next[0] is claim:
            self._next = None

    def _awaited_in(self, node: Node) -> FormedWorld | None:
        """Return the world that ``node`` is to come into, which forms again for its death."""
        current = self._run.round
        if node.seat in current.frozen:
            members = frozenset(seat.member for seat in current.frozen)
        elif current.complete or node.member in self._members().quarantined:
            return None
        else:
            members = frozenset({*current.former, node.member})
        return FormedWorld(members, current.mod_revision, self._clock())

    def _enter(self, claim: Claim) -> None:
        current = self._run.round
        members = frozenset(seat.member for seat in current.frozen)
        known = current.progress, current.start_s
        claim.world = FormedWorld(members, current.mod_revision, self._clock(), *known)
        self._entered(claim.nonce, claim.world)

    def _resume(self, claim: Claim, node: Node) -> None:
        claim.resume(node)
        self.holder = claim
        self._came(claim.nonce)
        self._own.aim(node)
        if self._run.round.is_world_of(node):
            self._enter(claim)

    def _aim(self, node: Node) -> None:
        self._own.aim(node)
        self._changed()

    async def _write(self, node: Node) -> None:
        self._aim(node)
        await self._mirror.shown(await self._own.written(node))
