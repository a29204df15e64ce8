# SPDX-License-Identifier: Apache-2.0
"""What a rank does at a step boundary, given what it has published and the gate it reads: pure.

At each boundary it publishes first and reads the gate then. The loop around it is::

    rank = arrive(rank, step)
    publish(rank)
    while True:
        verdict, rank = decide(rank, read_gate())
        if verdict == PUBLISH: publish(rank)       # and read the gate again
        elif verdict == WAIT: wait for another gate
        else: break                                # GO on, or SAVE

After a save it is ``rank = acknowledge(rank)`` or ``rank = fail(rank, why)``, publish, and the same
loop again, which then ends with ``GO``. Every rank must come to the same boundaries.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple

PUBLISH = "publish"
WAIT = "wait"
GO = "go"
SAVE = "save"

COUNTS_ANEW = "the loop counts its steps anew"


class RankGate(NamedTuple):
    """The part of ``gate.json`` that a rank acts on. ``master`` names the round it is about."""

    epoch: int
    master: str
    phase: str
    step: Optional[int]


class Rank(NamedTuple):
    """What a rank has published, or is about to; ``master`` names its round.

    ``held``: it stays at ``step`` until it has published otherwise. ``matched``: it has read a gate
    of its own round. ``saving``: the epoch it saves for, 0 for none. ``acked`` is (epoch, step) of
    its last save, ``failed`` (epoch, why) of the last one that did not succeed. ``former`` is the
    last boundary of the loop before this one, -1 for none.
    """

    master: str
    step: int = 0
    held: bool = False
    matched: bool = False
    saving: int = 0
    acked: Optional[Tuple[int, int]] = None
    failed: Optional[Tuple[int, str]] = None
    former: int = -1


def enter_again(rank: Rank) -> Rank:
    """Begin another loop; to be published. It stays at the last boundary of the one before."""
    return rank._replace(held=False, saving=0, former=rank.step)


def arrive(rank: Rank, step: int) -> Rank:
    """Come to the boundary ``step``; to be published before the gate is read."""
    return rank._replace(step=step, held=False, saving=0)


def decide(rank: Rank, gate: Optional[RankGate]) -> Tuple[str, Rank]:
    """Say what to do next: one of ``PUBLISH``, ``WAIT``, ``GO`` and ``SAVE``."""
    if gate is None:
        return _go(rank)
    if gate.master != rank.master:
        # A gate of an earlier round is ignored. Of a later one: this rank's round is over.
        return (WAIT, rank) if rank.matched else _go(rank)
    if not rank.matched:
        rank = rank._replace(matched=True)
    if gate.phase == "hold":
        return (WAIT, rank) if rank.held else (PUBLISH, rank._replace(held=True))
    if gate.phase == "commit" and gate.step is not None and rank.step >= gate.step:
        if _has_answered(rank, gate.epoch):
            return WAIT, rank
        return SAVE, rank._replace(saving=gate.epoch)
    if _is_of_former(rank, gate) and not _has_answered(rank, gate.epoch):
        return PUBLISH, rank._replace(failed=(gate.epoch, COUNTS_ANEW))
    if gate.phase == "done":
        return WAIT, rank
    return _go(rank)


def acknowledge(rank: Rank) -> Rank:
    """All that ``SAVE`` asked for is on disk; to be published."""
    return rank._replace(acked=(rank.saving, rank.step), saving=0)


def fail(rank: Rank, why: str) -> Rank:
    """The save failed; to be published."""
    return rank._replace(failed=(rank.saving, why), saving=0)


def _go(rank: Rank) -> Tuple[str, Rank]:
    # A vote may rest on "held" for as long as it stands: it is taken back, and the gate read once
    # more, before the rank moves.
    return (PUBLISH, rank._replace(held=False)) if rank.held else (GO, rank)


def _is_of_former(rank: Rank, gate: RankGate) -> bool:
    # The step was agreed on by the count of the loop before: in this one it may never come.
    agreed = gate.step if gate.phase == "commit" else None
    return agreed is not None and rank.step <= rank.former < agreed


def _has_answered(rank: Rank, epoch: int) -> bool:
    return any(mark is not None and mark[0] == epoch for mark in (rank.acked, rank.failed))
