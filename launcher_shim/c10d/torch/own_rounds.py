# SPDX-License-Identifier: Apache-2.0
"""The values that a torchrun finds in a round of its own, though they are not stored.

Its ranks join a world that changes in place; no other torchrun is in its round. So the values by
which the nodes of a round meet are made up, as far as torch reads them. ``MASTER_ADDR`` and
``MASTER_PORT`` are those of the real round: by them the ranks of one world name it alike, and none
connects there, as such a world has a store of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from launcher_shim.c10d.stages import local_world_size, role_info_key, round_prefix

_ASSIGNED = b"torchelastic/assigned_ranks/"

COUNTED_APART = -1
"""The answer to an addition in torch's exit barrier: no size of a world, so that no torchrun takes
itself for the last. They are in different rounds, of different sizes."""


def made_up(
    name: bytes, run_id: str, own: int, real: int, value: Callable[[bytes], bytes | None]
) -> bytes | None:
    """Return the value of ``name`` in the round ``own``; None for one that is stored, or not yet.

    ``real``: the round beside which it is. ``value`` looks up a launcher's key.
    """
    if name in (b"MASTER_ADDR", b"MASTER_PORT"):
        return value(round_prefix(run_id, real) + name)
    if name.startswith(_ASSIGNED) and name.removeprefix(_ASSIGNED).isdigit():
        place = int(name.removeprefix(_ASSIGNED))
        workers = local_world_size(value(role_info_key(run_id, own, place)))
        if workers:
            # As if every node before it, the last one, started as many workers as itself.
            first, size = place * workers, (place + 1) * workers
            return json.dumps([first, size, first, size]).encode()
    return None
