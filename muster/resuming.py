# SPDX-License-Identifier: Apache-2.0
"""The check that a script may start from the checkpoint that it has found.

It may not start from one older than the step that all ranks have saved: the directory is then not
the one that the pods share, and work would be lost. But a job that was deleted and created again
may find its directory empty, and train from scratch.
"""

from __future__ import annotations

import logging
from typing import Optional

from muster.checks import refuse
from muster.cursor import CommittedStep
from muster.gate import own_gate
from muster.progress import own_file

log = logging.getLogger(__name__)


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
