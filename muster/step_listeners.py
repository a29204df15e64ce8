# SPDX-License-Identifier: Apache-2.0
"""Callbacks for this process's step boundaries and saves, besides the reports to the sidecar.

A listener is called at a boundary before the rank goes on, and for a save before it counts: so the
content of a checkpoint is on record no later than the checkpoint itself.
"""

from __future__ import annotations

from typing import Callable, List, NamedTuple


class Listener(NamedTuple):
    """A pair of callbacks: ``arrive`` at the boundary after a step, ``save`` once a step is saved.

    ``save`` returns why the save must not count, or an empty string. It may raise an exception that
    ends the process.
    """

    arrive: Callable[[int], None]
    save: Callable[[int], str]


listeners: List[Listener] = []
"""The listeners of this process, in the order in which they were added."""


boundaries = 0
"""The boundaries that this process has come to."""


def arrive(step: int) -> None:
    """Call every listener for a boundary."""
    for listener in listeners:
        listener.arrive(step)


def save(step: int) -> str:
    """Call the listeners for a save; return why it must not count, or an empty string."""
    for listener in listeners:
        why = listener.save(step)
        if why:
            return why
    return ""
