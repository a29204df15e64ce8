# SPDX-License-Identifier: Apache-2.0
"""The answers that no launcher has stored: a view as torch's state, and values of a dead round."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from launcher_shim.c10d.rounds.views import View
from launcher_shim.c10d.torch.state_codec import NodeDesc, TorchState

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
