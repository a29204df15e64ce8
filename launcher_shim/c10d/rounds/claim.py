# SPDX-License-Identifier: Apache-2.0
"""One connection's claim to the place of its pod in a run."""

from __future__ import annotations

from dataclasses import dataclass

from launcher_shim.c10d.rounds.records import Node
from rdzv.records.quarantine import FormedWorld


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
    """The encoding of a state by its torch (``launcher_shim.c10d.torch.agent.spell_flavour``)."""

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
