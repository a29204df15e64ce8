# SPDX-License-Identifier: Apache-2.0
"""What a rank does at a step boundary, given what it has published and the gate it reads: pure.

At each boundary it publishes first and reads the gate then. The loop around it is::

    rank = arrive(rank, step)
    publish(rank)
    while True:
        verdict, rank = decide(rank, read_gate())
        if verdict == "publish": publish(rank)       # and read the gate again
        elif verdict == "wait": wait for another gate
        else: break                                  # "go" on, or "save"

After a save it is ``rank = acknowledge(rank)`` or ``rank = fail(rank, why)``, publish, and the same
loop again, which then ends with "go".
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple

PUBLISH = "publish"
WAIT = "wait"
GO = "go"
SAVE = "save"


class Gate(NamedTuple):
    """The part of ``gate.json`` that a rank acts on."""

    epoch: int
    master: str
    phase: str
    step: Optional[int]


class Rank(NamedTuple):
    """What a rank has published, or is about to.

    ``matched``: it has read a gate of its own round. ``saving``: the epoch it saves for, 0 for
    none.
    """

    master: str
    step: int = 0
    held: bool = False
    matched: bool = False
    saving: int = 0
    acked: Optional[Tuple[int, int]] = None
    failed: Optional[Tuple[int, str]] = None


def arrive(rank: Rank, step: int) -> Rank:
    """Come to the boundary ``step``; to be published before the gate is read."""
    raise NotImplementedError


def decide(rank: Rank, gate: Optional[Gate]) -> Tuple[str, Rank]:
    """Say what to do next: one of ``PUBLISH``, ``WAIT``, ``GO`` and ``SAVE``."""
    raise NotImplementedError


def acknowledge(rank: Rank) -> Rank:
    """All that ``SAVE`` asked for is on disk; to be published."""
    raise NotImplementedError


def fail(rank: Rank, why: str) -> Rank:
    """The save failed; to be published."""
    raise NotImplementedError
