# SPDX-License-Identifier: Apache-2.0
"""Who is told of this process's step boundaries and saves, beside the sidecar.

What listens is told of a boundary before the rank goes on, and of a save before it counts: so what
a checkpoint contains is on record no later than the checkpoint itself.
"""

from __future__ import annotations

from typing import Callable, List, NamedTuple


class Listener(NamedTuple):
    """``arrive`` is called at the boundary after a step; ``save`` once a step is saved.

    ``save`` returns why the save must not count, or an empty string. It may raise what ends the
    process.
    """

    arrive: Callable[[int], None]
    save: Callable[[int], str]


listeners: List[Listener] = []
"""Of this process, in the order in which they came."""


def arrive(step: int) -> None:
    """Tell all of a boundary."""
    for listener in listeners:
        listener.arrive(step)


def save(step: int) -> str:
    """Tell all of a save; returns why it must not count, empty where it may."""
    for listener in listeners:
        why = listener.save(step)
        if why:
            return why
    return ""
