# SPDX-License-Identifier: Apache-2.0
"""A view rendered as the rendezvous state that torch reads."""

from __future__ import annotations

from datetime import UTC, datetime

from launcher_shim.c10d.rounds.views import View
from launcher_shim.c10d.torch.state_codec import NodeDesc, TorchState

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
