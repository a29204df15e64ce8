# SPDX-License-Identifier: Apache-2.0
"""Answers for agents that wait for a world which will never form.

Between the rendezvous and its workers an agent waits for keys that others of its world set. If one
of them is gone it would wait 300 s and then close the job. So it is given values that are never
stored: it gets through, starts workers that reach no others, comes to its monitor loop and finds
there that the world forms again. No restart is used up.
"""

from __future__ import annotations

import json

NOWHERE_PORT = b"1"
"""tcpmux: no process listens there, so that the workers never find what they look for."""

LAST_OUT = b"torchelastic/agent/terminal_state/last_member"
"""The key that the last node of a world sets at its exit; the others of this one are in a later
world."""


def filler(name: bytes) -> bytes | None:
    """Return the value of an unset key of a round; None for one that is never filled.

    It must not form a world: rank 1 of a million is never complete (a world of one would start to
    train by itself).
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
