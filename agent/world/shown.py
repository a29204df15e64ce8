# SPDX-License-Identifier: Apache-2.0
"""The file by which the ranks of one pod learn of a change of their world: pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rdzv.keys import RunKeys
from rdzv.records.world import WorldChange


def root_of(keys: RunKeys) -> str:
    """Return the start of the keys by which the ranks of a run's worlds meet.

    Worlds of two runs may have the same number.
    """
    return f"muster.world/{keys.name}/"


def prefix_of(root: str, number: int) -> str:
    """Return the start of those of world ``number``."""
    return f"{root}{number}/"


def shown(
    change: WorldChange,
    world: int,
    members: Sequence[str],
    member: str,
    *,
    was_in: bool,
    own_round: bool,
    closed: bool,
    store: str,
    root: str,
) -> bytes:
    """Return the content of the file of ``member``'s pod.

    ``world`` and ``members`` are those of the world that has formed. ``was_in``: whether the ranks
    of the pod were in a world. ``own_round``: whether their torchrun is in a round of its own, so
    that they cannot train in the world that it believes to have started. ``closed``: whether the
    run has ended well. ``store``: the address at which its ranks reach the sidecar; ``root``: as of
    ``root_of``.
    """
    fields: dict[str, object] = {
        "epoch": change.epoch,
        "phase": "idle",
        "number": world or -1,
        "step": None,
        "why": change.reason,
    }
    if closed and member not in members:
        fields["phase"] = "over"
    elif change.phase == "form" and member in change.seats:
        place = change.seats.index(member)
        fields |= {
            "phase": "form",
            "number": change.number,
            "step": change.step,
            "size": sum(change.sizes),
            "first_rank": change.first_rank(member),
            "source": change.first_rank(change.source) + change.holder,
            "store": store,
            "prefix": prefix_of(root, change.number),
            "seats": change.seats,
            "local_size": change.sizes[place],
        }
    elif change.phase == "broken":
        # Also to newcomers: they may have been asked to form the world that failed.
        fields |= {"phase": "broken", "number": change.number}
    elif change.phase == "fall-back":
        fields |= {"phase": "fall-back", "number": change.number if own_round else -1}
    elif member in members:
        # One that leaves stays held while the others form the next world.
        fields |= {"phase": change.phase, "step": change.step}
        if change.phase == "form":
            fields["phase"] = "hold"
    elif was_in and world:
        fields["phase"] = "leave"
    return json.dumps(fields).encode()


IDLE = shown(
    WorldChange(), 0, (), "", was_in=False, own_round=False, closed=False, store="", root=""
)
"""The content before any change: by it a script knows that the sidecar beside it knows worlds."""
