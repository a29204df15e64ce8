# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that a world may go on from: its save tag, the newest world's mark, and the check.

A world that the network cuts off trains on, and pods that have the store may form another one
meanwhile, with the same directory. With the tag in the path they never write the same file; where a
trainer has names of its own, the mark of a later world forbids the save. No script may start from
a step older than the one that all ranks have saved: work would be lost.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from contextlib import suppress
from typing import Callable, Mapping, Optional

from muster.gate import own_gate
from muster.process import CENTRAL_DRIVER, RankIdentity, refuse
from muster.progress import own_file
from muster.saved_steps import CommittedStep

log = logging.getLogger(__name__)

ROUNDS_PER_LIFE = 1_000_000
"""Each life of the job numbers its rounds from a multiple of this."""

TAG = re.compile(r"life\d{5,9}-round\d{6}-[0-9a-f]{10}")
"""The form of every tag: at most 40 characters, all of them safe in file names."""

FIRST = "life00001"
"""No tag of a round that a sidecar has confirmed sorts before this."""

ALONE = "life00000-round000000-0000000000"
"""The tag of a script without a sidecar; it sorts before all others."""

MARK = "muster-tag"
"""The name of the file: in a checkpoint directory, and in a checkpoint that is a directory."""


class CheckpointMissing(RuntimeError):
    """All ranks have saved a step, and the script would start from an earlier one."""


def last_commit() -> Optional[CommittedStep]:
    """Return the newest step that all ranks of a world saved and acknowledged; None without one.

    Its ``cursor`` is what all of them gave to ``committed`` with it; None if they gave none. Its
    ``tag`` is the ``save_tag()`` of that world; empty if its ranks did not ask for one.

    Call it before ``muster.drain()``, to load the checkpoint of that step. It waits as ``drain()``
    does. None also without a sidecar. The step may be of a former life of the job, whose
    checkpoints may be gone: ``check_start`` checks that.
    """
    file, gate = own_file(), own_gate()
    if file is None or gate is None:
        return None
    gate.wait_for_own(file.rank)
    reading = gate.read()
    return reading.last_commit if reading is not None else None


def check_start(step: int, where: object) -> int:
    """Check that ``step``, of the newest checkpoint in ``where``, is one to start from; return it.

    0 is no checkpoint. Raises ``CheckpointMissing`` if the last commit is newer and was made in
    this life of the job; logs a warning if a former life made it. Call it before
    ``muster.drain()``. Without a sidecar there is nothing to check.
    """
    global _started_from
    missing, of_former_life = shortfall(step, where)
    if missing and not of_former_life:
        raise CheckpointMissing(missing)
    if missing:
        log.warning("%s", missing)
    _started_from = step
    return step


def started_from() -> Optional[int]:
    """Return the step that ``check_start`` was given; None if it was not called.

    It may be later than the last commit: a checkpoint that no other rank has reported.
    """
    return _started_from


_started_from: Optional[int] = None


def shortfall(step: int, where: object) -> "tuple[str, bool]":
    """Return a sentence on the missing commit, if any, and whether a former life saved it."""
    committed = last_commit()
    if committed is None or step >= committed:
        return "", False
    return sentence(step, committed, where, committed.of_former_life), committed.of_former_life


def sentence(step: int, committed: int, where: object, of_former_life: bool) -> str:
    """Build the sentence on the missing commit: the possible causes, and what to do."""
    checkpoint = "the newest checkpoint in %s is of step %d" % (where, step)
    if not step:
        checkpoint = "there is no checkpoint in %s" % (where,)
    if of_former_life:
        begins = "resumes from that one" if step else "trains from scratch"
        return (
            "an earlier job of this name committed step %d, but %s: this job %s; to resume from"
            " step %d instead, give it the checkpoint directory of the earlier job"
            % (committed, checkpoint, begins, committed)
        )
    return (
        "all ranks of this job have saved step %d, and %s: either it is not the directory that all"
        " pods share, or it was emptied to train from scratch; share it, or run `muster forget` for"
        " this job and start it again; see docs/operations.md#a-job-is-created-again"
        % (committed, checkpoint)
    )


def check_first(step: int, load: str) -> None:
    """Check before training that the first step is later than the last commit.

    ``load``: what to write so that it is. Raises ``CheckpointMissing`` if it is not; logs a warning
    if a former life of the job made the commit. What a process trains later is its own affair.
    """
    file = own_file()
    if file is None or file.left is not None:
        return
    committed = last_commit()
    if committed is not None and step <= committed:
        _refuse(step, committed, load)


def begins_late(step: int, committed: CommittedStep) -> None:
    """Refuse the first boundary of a loop at ``step``, which is not above ``committed``.

    A loop may begin with its boundary, and has trained nothing there: at ``committed`` itself it
    logs a warning.
    """
    if step < committed:
        _refuse(step, committed, "load its checkpoint, and give its step to muster.drain(start=)")
    else:
        log.warning(
            "the first drain.commit_due(%d) is of the last commit: if the loop has trained a step"
            " before it, begin at step %d",
            step,
            step + 1,
        )


def _refuse(step: int, committed: CommittedStep, load: str) -> None:
    if committed.of_former_life:
        log.warning(
            "an earlier job of this name committed step %d, and this job trains without it from"
            " step %d: to resume from it, %s",
            committed,
            step,
            load,
        )
        return
    refuse(
        CheckpointMissing(
            "all ranks of this job have saved step %d, and training begins at step %d: %s; to train"
            " from scratch, run `muster forget` for this job and start it again"
            % (committed, step, load)
        )
    )


def save_tag() -> str:
    """Return the tag of the present world, to be part of each path that this world saves to.

    It is the same on every rank of the world. It stays the same as long as the process lives, but
    for one change if the sidecar confirms the round later than a rank waits for it: so call it for
    each save. Once called, this rank's saves are on record with it: ``last_commit().tag``. Call it
    in the rank's own process. A rank of torchrun waits for its sidecar as ``drain()`` does. Without
    a sidecar it is always the same text.

    A world that the network cuts off from the store trains on, and pods that have the store may
    form another one meanwhile. With the tag in the path they never write the same file, and
    ``last_commit().tag`` names the one that is on record. A tag is
    ``life00001-round000012-8f3a1c2d9b``: the life of the job, the round in it, and a digest of
    the run and of the address at which the ranks of the round meet. The store freezes each
    round once, and numbers rounds in order, so tags of one run sort as its worlds formed. Two
    worlds that train at the same time cannot meet at one address: their tags differ even if the
    store was restored.
    """
    file, gate = own_file(), own_gate()
    if file is None or gate is None:
        return ALONE
    if file.tag < FIRST:
        # Unless the sidecar confirms the round later, ranks of one world may have different tags
        # and save parts that do not belong together: such a save counts for no rank.
        reading = gate.read() if gate.wait_for_own(file.rank) else None
        if reading is None or not file.rank.of_torchrun:
            file.take_tag(unconfirmed_tag(file.rank, os.environ))
        else:
            file.take_tag(world_tag(reading.run, reading.round, file.rank.master))
    return file.tag


def world_tag(run: str, number: int, master: str) -> str:
    """Return the tag of round ``number`` of ``run``, whose ranks meet at ``master``."""
    life, round = divmod(number, ROUNDS_PER_LIFE)
    return _tag(life + 1, round, run, master)


def life_of(tag: str) -> str:
    """Return the part of a tag that is the same in all worlds of one life of the job."""
    return tag.partition("-")[0]


def unconfirmed_tag(rank: RankIdentity, environ: Mapping[str, str]) -> str:
    """Return a tag for a world of an unknown round; ranks of a central launcher share a driver."""
    if rank.of_torchrun:
        return _tag(0, 0, environ.get("TORCHELASTIC_RUN_ID", ""), rank.master)
    address, port = (environ.get(name, "") for name in CENTRAL_DRIVER)
    return _tag(0, 0, "", "%s:%s" % (address, port)) if port else ALONE


def _tag(life: int, round: int, run: str, master: str) -> str:
    digest = hashlib.sha256(("%s\n%s" % (run, master)).encode("utf-8", "surrogateescape"))
    return "life%05d-round%06d-%s" % (life, round, digest.hexdigest()[:10])


class LaterWorld(RuntimeError):
    """Another world of this job has begun since, and saves to the same directory."""


class WorldMark:
    """One world's claim to ``directory``. ``marks``: this is the rank that writes the mark.

    It does nothing until a sidecar has confirmed the round: then ``tag`` changes, once.

    Trainers save to names of their own, such as ``checkpoint-500`` and ``last.ckpt``, which two
    worlds would share. So each world that begins writes its tag to ``muster-tag`` beside them.
    One that finds a later world's tag there was cut off from the store, and may not save any
    more.
    """

    def __init__(self, directory: str, *, marks: bool, tag: Callable[[], str] = save_tag) -> None:
        self._directory = directory
        self._marks = marks
        self._tag = tag

    def begin(self) -> None:
        """Mark the directory as this world's, whichever marked it before."""
        own = self._tag()
        if self._marks and own >= FIRST:
            with suppress(OSError):  # what cannot be made cannot be marked either
                os.makedirs(self._directory, exist_ok=True)
            mark(self._directory, own)

    def check(self) -> None:
        """Raise ``LaterWorld`` if a later world's mark is there; call it before each save."""
        own = self._tag()
        if own < FIRST:
            return
        found = marked(self._directory)
        if found > own:
            raise LaterWorld(
                "a later world of this job saves to %s (%s), and this rank is of %s: its pod was"
                " cut off from the store, so it may not save here any more"
                % (self._directory, found, own)
            )
        if found != own:  # an earlier world began more slowly, or the round was confirmed late
            self.begin()


def mark(directory: str, tag: str) -> None:
    """Write a tag into a directory, aside and renamed; log a warning if that fails."""
    path = os.path.join(directory, MARK)
    aside = "%s.%d.part" % (path, os.getpid())
    try:
        with open(aside, "w", encoding="ascii") as file:
            file.write(tag + "\n")
        os.replace(aside, path)
    except OSError as error:
        log.warning("cannot write which world saves to %s: %s", directory, error)
        with suppress(OSError):
            os.unlink(aside)


def marked(directory: str) -> str:
    """Return the tag in a directory; empty without one."""
    try:
        with open(os.path.join(directory, MARK), encoding="ascii", errors="replace") as file:
            tag = file.read(64).strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        log.warning("cannot read which world saves to %s: %s", directory, error)
        return ""
    return tag if TAG.fullmatch(tag) else ""


def is_left_behind(step: int, tag: str, committed: Optional[CommittedStep]) -> bool:
    """Return whether a save that is later than ``committed`` is of a world before that one.

    That world was cut off from the store and trained on for itself. ``committed`` is that of
    ``last_commit()``. Tags of two lives say nothing of each other: the directory may be another
    job's.
    """
    if committed is None or committed.of_former_life or life_of(tag) != life_of(committed.tag):
        return False
    return step > committed and "" < tag < committed.tag
