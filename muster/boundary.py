# SPDX-License-Identifier: Apache-2.0
"""A rank's decision at a step boundary, from its published state and the gate it reads: pure.

At each boundary the rank publishes its state first and then reads the gate. The loop around it is::

    rank = arrive(rank, step)
    publish(rank)
    while True:
        verdict, rank = decide(rank, read_gate())
        if verdict == PUBLISH: publish(rank)       # and read the gate again
        elif verdict == WAIT: wait for another gate
        else: break                                # GO on, or SAVE

Before its first step, it publishes that it takes part and runs the loop with ``begin`` instead: a
sidecar that has voted for the pod without this rank relies on it.

A gate that is ``cut`` waits for a store that takes no writes. A rank that it stops publishes that
the epoch has failed, and then goes on: the pod's sidecar acknowledges no such epoch, also after it
has started again.

After a save, call ``rank = acknowledge(rank)`` or ``rank = fail(rank, why)``, publish, and run the
same loop again, which then ends with ``GO``. Every rank must come to the same boundaries.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple

PUBLISH = "publish"
WAIT = "wait"
GO = "go"
SAVE = "save"

ENTERED_STEP = -1
"""The step that is published on the first entry: before any boundary that there can be."""

COUNTS_ANEW = "the loop counts its steps anew"
CUT = "the store took no writes, and training went on"


class RankGate(NamedTuple):
    """The part of the gate that a rank acts on. ``master`` names the round it is for."""

    epoch: int
    master: str
    phase: str
    step: Optional[int]
    cut: bool = False


class Rank(NamedTuple):
    """A rank's state, published or about to be; ``master`` names its round.

    ``held``: the rank stays at ``step`` until it publishes otherwise. ``matched``: it has read a
    gate of its own round. ``saving``: the epoch it saves for, 0 for none. ``acked`` is (epoch,
    step) of its last save, ``failed`` (epoch, why) of its last save that failed. ``former`` is the
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
    """Begin another loop at the last boundary of the former. The caller publishes the result."""
    return rank._replace(held=False, saving=0, former=rank.step)


def begin(rank: Rank, gate: Optional[RankGate]) -> Tuple[str, Rank]:
    """Decide on ``PUBLISH``, ``WAIT`` or ``GO`` before the first step; return it and the new state.

    A rank does not begin while those of its round are held.
    """
    if gate is None or gate.master != rank.master or gate.phase != "hold":
        return GO, rank
    return _give_up(rank, gate.epoch) if gate.cut else (WAIT, rank)


def arrive(rank: Rank, step: int) -> Rank:
    """Come to the boundary ``step``. The caller publishes the result before it reads the gate."""
    master, _, _, matched, _, acked, failed, former = rank  # at each step: a third of _replace
    return Rank(master, step, False, matched, 0, acked, failed, former)


def decide(rank: Rank, gate: Optional[RankGate]) -> Tuple[str, Rank]:
    """Decide on ``PUBLISH``, ``WAIT``, ``GO`` or ``SAVE``; return it and the new state."""
    if gate is None:
        return _go(rank)
    if gate.master != rank.master:
        # Ignore a gate of an earlier round. A gate of a later one means that this rank's round is
        # over.
        return (WAIT, rank) if rank.matched else _go(rank)
    if not rank.matched:
        rank = rank._replace(matched=True)
    saves = gate.phase == "commit" and gate.step is not None and rank.step >= gate.step
    if saves and not _has_answered(rank, gate.epoch):
        return SAVE, rank._replace(saving=gate.epoch)
    if gate.cut and (saves or gate.phase in ("hold", "done")):
        return _give_up(rank, gate.epoch)
    if saves:
        return WAIT, rank
    if gate.phase == "hold":
        return (WAIT, rank) if rank.held else (PUBLISH, rank._replace(held=True))
    if _is_of_former(rank, gate) and not _has_answered(rank, gate.epoch):
        return PUBLISH, rank._replace(failed=(gate.epoch, COUNTS_ANEW))
    if gate.phase == "done":
        return WAIT, rank
    return _go(rank)


def waits_for(rank: Rank, gate: Optional[RankGate]) -> str:
    """Return what a rank waits for, after ``begin`` or ``decide`` made it wait."""
    if gate is not None and gate.master != rank.master:
        return "its world is over, and torchrun has to end this process"
    if gate is None or gate.phase == "hold":
        return "the ranks of this world are agreeing on a step to save"
    if gate.phase == "done":
        return "all ranks have saved, and torchrun has to end this process"
    return "other ranks have not saved step %s yet" % gate.step


def acknowledge(rank: Rank) -> Rank:
    """Record that all that ``SAVE`` asked for is on disk. The caller publishes the result."""
    return rank._replace(acked=(rank.saving, rank.step), saving=0)


def fail(rank: Rank, why: str) -> Rank:
    """Record that the save failed, and ``why``. The caller publishes the result."""
    return rank._replace(failed=(rank.saving, why), saving=0)


def _go(rank: Rank) -> Tuple[str, Rank]:
    # A vote may rely on "held" for as long as it is published: withdraw it, and read the gate once
    # more, before the rank moves.
    return (PUBLISH, rank._replace(held=False)) if rank.held else (GO, rank)


def _give_up(rank: Rank, epoch: int) -> Tuple[str, Rank]:
    if rank.failed is None or rank.failed[0] != epoch:
        return PUBLISH, rank._replace(failed=(epoch, CUT))
    return _go(rank)


def _is_of_former(rank: Rank, gate: RankGate) -> bool:
    # The loop before agreed on the step by its own count, which this loop may never reach.
    agreed = gate.step if gate.phase == "commit" else None
    return agreed is not None and rank.step <= rank.former < agreed


def _has_answered(rank: Rank, epoch: int) -> bool:
    return any(mark is not None and mark[0] == epoch for mark in (rank.acked, rank.failed))
