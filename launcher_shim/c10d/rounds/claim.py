# SPDX-License-Identifier: Apache-2.0
"""One connection's claim to the place of its pod in a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher_shim.c10d.rounds.records import Node

Ending = Literal["died", "gave up", "other"]
"""How a torchrun has ended. ``died``: by itself, with a place. ``gave up``: by itself, while it
waited for one, as by a join timeout. ``other``: on request, or because its work was done."""


@dataclass(slots=True, eq=False)
class Claim:
    """One connection's claim to its member's place; its agent writes the fields.

    A newer connection of the same member replaces the older one when it first names itself.
    """

    nonce: str
    """Names the connection, also to later sidecars."""
    seen_s: float
    """When the torchrun last gave a sign of life; monotonic, as all times here."""
    asked_s: float
    """Since when its join timeout runs: since it asked, or was promoted."""
    pending: int = 0
    """Number of unanswered requests: while there is one, silence is no sign of a hang."""
    parked: bool = False
    """Whether it was last shown that it is redundant, which only a promotion ends."""
    parks: bool = True
    """Whether its version of torch knows a redundancy list, and its maximum is the job's."""
    filled_round: int = -1
    """The round for which it was given fillers: there it never meets the others."""
    world_since_s: float | None = None
    """Since when it is in the world that it was last handed; None before the first, or where that
    was a sidecar before this one."""
    gave_up: bool = False
    """Whether its torchrun has ended its wait for a place by itself."""
    addr: str = ""
    pid: int = -1
    """Its torchrun's process number, in its own container; -1 while it has not named itself."""
    local_id: int = -1
    flavour: str = ""
    """How its torch spells a state (``launcher_shim.c10d.torch.agent.spell_flavour``)."""

    @property
    def named(self) -> bool:
        """Whether its torchrun has named itself."""
        return self.pid >= 0

    def request_began(self, now_s: float) -> None:
        """Note the start of a request."""
        self.pending += 1
        self.seen_s = now_s

    def request_ended(self, now_s: float) -> None:
        """Note the answer to a request."""
        self.pending -= 1
        self.seen_s = now_s

    def excuse(self, now_s: float) -> None:
        """Count silence from ``now_s`` on: it was this sidecar that stood still."""
        self.seen_s = now_s

    def resume(self, node: Node) -> None:
        """Take over from ``node`` what a client that outlived its sidecar has said of itself."""
        self.addr, self.pid, self.local_id = node.addr, node.pid, node.local_id
        self.flavour = node.flavour
        # It may have been parked: promotion is safe at any time.
        self.parked = True

    def asking(self, member: str, ask: int) -> Node:
        """Make the record by which ``member`` asks for the ``ask``-th time on this connection."""
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
